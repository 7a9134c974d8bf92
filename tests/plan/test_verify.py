"""The stand-alone verifier: runs without palimpsest, refuses every kind of lie, and takes nothing but the exact form."""

import ast
import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from plan_cases import buffer, k31_program, program, step

import palimpsest.plan.verify
from palimpsest.core.spec import Limits
from palimpsest.plan.file import plan_text, plan_tree
from palimpsest.plan.place import place
from palimpsest.plan.verify import verify_plan_file, verify_tree

SOURCE = Path(palimpsest.plan.verify.__file__)


@pytest.fixture(scope="module")
def tree():
    made = k31_program(8192, 256, 4)
    return plan_tree(made, place(made))


def test_it_imports_the_standard_library_alone():
    nodes = [n for n in ast.walk(ast.parse(SOURCE.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {a.name if isinstance(n, ast.Import) else n.module for n in nodes for a in n.names}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


@pytest.mark.parametrize("reuse", ["on", "off"])
def test_a_file_is_verified_by_the_script_alone(tmp_path, reuse):
    made = k31_program(8192, 256, 4)
    file = tmp_path / "plan.json"
    file.write_text(plan_text(made, place(made, reuse)), "utf-8")
    report = verify_plan_file(file)
    assert report.ok, report.faults
    assert report.digest == place(made, reuse).digest
    assert report.checked["buffers"] == len(made.all_buffers)
    alone = tmp_path / "verify.py"
    alone.write_text(SOURCE.read_text("utf-8"), "utf-8")
    done = subprocess.run(
        [sys.executable, "-I", str(alone), str(file)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "every statement holds" in done.stdout
    file.write_text(file.read_text().replace('"offset":0', '"offset":64', 1))
    done = subprocess.run(
        [sys.executable, "-I", str(alone), str(file)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    assert "REFUSED" in done.stdout


def place_of(tree, name):
    return next(p for p in tree["plan"]["places"] if p["buffer"] == name)


def step_of(tree, name):
    return next(s for s in tree["program"]["steps"] if s["name"] == name)


def lies():
    def edit(what):
        return what

    return {
        "moved buffer": (edit(lambda t: place_of(t, "hidden").update(offset=0)), "without a certificate"),
        "off its alignment": (edit(lambda t: place_of(t, "hidden").update(offset=1)), "no multiple"),
        "shrunk buffer": (edit(lambda t: place_of(t, "ids").update(nbytes=64)), "ids nbytes 64"),
        "other kind": (edit(lambda t: place_of(t, "ids").update(kind="staging")), "ids kind staging"),
        "weights on weights": (edit(lambda t: place_of(t, "w.q_b").update(offset=0)), "bytes of the weights segment"),
        "missing place": (edit(lambda t: t["plan"]["places"].pop()), "place every buffer once"),
        "twice": (edit(lambda t: t["plan"]["places"].append(t["plan"]["places"][0])), "place every buffer once"),
        "small segment": (edit(lambda t: t["plan"]["segments"][0].update(nbytes=1)), "segment has 1 bytes"),
        "large segment": (edit(lambda t: t["plan"]["segments"][0].update(nbytes=1 << 40)), "weights segment has"),
        "dropped certificate": (edit(lambda t: t["plan"]["handovers"].pop()), "without a certificate"),
        "certificate of nothing": (
            edit(lambda t: t["plan"]["handovers"].append({**t["plan"]["handovers"][0], "late": "output"})), "the places do not"),
        "certificate twice": (edit(lambda t: t["plan"]["handovers"].append(t["plan"]["handovers"][0])), "certified twice"),
        "wrong bound": (edit(lambda t: t["plan"].update(lower_bound=64)), "lower bound of 64"),
        "wrong life": (edit(lambda t: place_of(t, "ids").update(last="bind_inputs")), "ids lives from exchange_ids to"),
        "other program digest": (edit(lambda t: t["plan"].update(program_digest="0")), "program digest"),
        "larger buffer in the program": (
            edit(lambda t: t["program"]["buffers"][5]["planes"][0]["shape"].__setitem__(0, 999)), "the program declares"),
        "reads before writes": (edit(lambda t: t["program"]["steps"].reverse()), "read before any step has written"),
        "a step less": (edit(lambda t: t["program"]["steps"].pop(0)), "read before any step"),
        "no barrier": (edit(lambda t: step_of(t, "selection_barrier").update(scope="rank")), "no step that all ranks reach"),
        "reuse off": (edit(lambda t: t["plan"].update(reuse="off")), "reuse is off"),
        "reuse maybe": (edit(lambda t: t["plan"].update(reuse="maybe")), "'on' or 'off'"),
        "own queue": (edit(lambda t: step_of(t, "gather_latent").update(queue="copy")), "nothing orders"),
        "other limits": (edit(lambda t: t["plan"]["limits"].update(ranks=1)), "limits"),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(lies()))
def test_every_lie_is_found(tree, name):
    bad = copy.deepcopy(tree)
    change, words = lies()[name]
    change(bad)
    report = verify_tree(bad)
    assert not report.ok
    assert any(words in fault for fault in report.faults), report.faults
    assert "REFUSED" in report.lines()[0]


FORMS = [
    "", "[]", "nul", '{"format":1}', "[" * 100_000, '{"format":"palimpsest-plan-file-1","program":{},"plan":{}}',
    '{"format":"palimpsest-plan-file-1","program":3,"plan":[]}', '{"format":"palimpsest-plan-file-2","program":{},"plan":{}}',
]  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_a_file_of_another_form_is_refused_and_never_raises(tmp_path, text):
    file = tmp_path / "plan.json"
    file.write_text(text)
    report = verify_plan_file(file)
    assert not report.ok
    assert report.faults


def test_a_missing_file_and_floats_and_twice_named_fields_are_refused(tmp_path, tree):
    assert "cannot read" in verify_plan_file(tmp_path / "none.json").faults[0]
    file = tmp_path / "plan.json"
    for text, words in (
        (json.dumps(tree).replace('"lower_bound": ', '"lower_bound": 1.5, "x": '), "not a whole number"),
        (json.dumps(tree).replace('"placer"', '"placer": "a", "placer"', 1), "names a field twice"),
        (json.dumps(tree).replace('"offset": 0', '"offset": -1', 1), "whole number between 0 and"),
        (json.dumps(tree).replace('"offset": 0', '"offset": true', 1), "whole number between 0 and"),
    ):
        file.write_text(text)
        assert words in verify_plan_file(file).faults[0]


def test_a_hostile_tree_is_a_report_and_not_an_exception(tree):
    """Every value of the file replaced by something of another type, one at a time."""
    paths = []

    def walk(at, path):
        for key, value in at.items() if isinstance(at, dict) else enumerate(at[:2]):
            paths.append((*path, key))
            if isinstance(value, dict | list):
                walk(value, (*path, key))

    walk(tree, ())
    assert len(paths) > 100
    for path in paths:
        for value in (None, -1, "x", [], {}, [[]]):
            bad = copy.deepcopy(tree)
            at = bad
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            assert isinstance(verify_tree(bad).ok, bool), path


def test_one_rank_needs_no_barrier():
    made = program(
        [buffer("a", 16), buffer("b", 16)], [step("s0", writes="a"), step("s1", reads="a"), step("s2", writes="b")],
        histories=("a", "b"), outputs=("b",),
    )  # fmt: skip
    assert verify_tree(plan_tree(made, place(made))).ok
    two = type(made)("t", Limits(64, 16, 2), made.buffers, made.steps, made.histories, made.inputs, made.outputs)
    assert verify_tree(plan_tree(two, place(two))).ok
    assert place(two).peak == 2 * place(made).peak
