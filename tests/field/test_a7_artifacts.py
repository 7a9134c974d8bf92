"""Field cases A7: a plan that is written, read again, and used for something else."""

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from palimpsest.checkpoint.make import make
from palimpsest.core.canon import plain
from palimpsest.core.errors import BadConfig, PlanRefused, UserError
from palimpsest.core.geometry import Formats
from palimpsest.plan.check import check
from palimpsest.plan.place import place
from palimpsest.plan.plan import Plan

OVERLAP = """
import json, sys
import torch
from palimpsest.core.spec import Buffer, Limits, Plane, Program, Step
from palimpsest.plan.plan import Plan
from palimpsest.run.arena import Arena
tree = json.load(sys.stdin)
pairs = lambda items: tuple(tuple(item) for item in items)
planes = lambda b: tuple(Plane(p["name"], p["dtype"], tuple(p["shape"]), tuple(p["axes"])) for p in b["planes"])
buffers = tuple(Buffer(**{**b, "planes": planes(b)})
                for b in tree["buffers"])
lists = ("reads", "writes", "updates", "params")
steps = tuple(Step(**{**s, **{k: pairs(s[k]) for k in lists}, "after": tuple(s["after"])}) for s in tree["steps"])
rest = {k: tuple(tree[k]) for k in ("histories", "inputs", "outputs")}
program = Program(tree["name"], Limits(**tree["limits"]), buffers, steps, **rest)
arena = Arena(program, Plan.from_json(tree["plan"]))
keys, latent = arena.raw("index_history"), arena.raw("latent_history")
keys.fill_(7)
print(keys.data_ptr() - latent.data_ptr(), int((latent == 7).sum()), keys.numel())
"""


def test_7_01_a_plan_of_other_sizes_is_refused_by_field(m0) -> None:
    """A plan for C=64 meets a program with another context, top-k, record, rank count or order: the difference is named."""
    made = m0.program()
    plan = Plan.from_json(place(made).to_json())
    check(made, plan)
    others = {
        "tokens": m0.program(tokens=96),
        "topk": m0.program(m0.geometry(topk=9)),
        "dtype": m0.program(formats=Formats(latent="bf16")),
        "rows": m0.program(rows=15),
        "ranks": m0.program(ranks=2),
        "heads": m0.program(m0.geometry(index_heads=4)),
    }
    for what, other in others.items():
        with pytest.raises(PlanRefused, match=r"the plan gives \S+ bytes \d+; program m0/layer0 declares \d+") as caught:
            check(other, plan)
        assert "\n" not in str(caught.value), what
    scale = dataclasses.replace(m0.geometry(), softmax_scale=0.31)
    with pytest.raises(PlanRefused, match="program digest"):
        check(m0.program(scale), plan)  # the same bytes, another arithmetic
    with pytest.raises(PlanRefused, match="limits"):
        check(made, dataclasses.replace(plan, limits=dataclasses.replace(plan.limits, page=8)))


def test_7_01_every_field_of_the_program_is_in_the_key(m0) -> None:
    """Change any one value of the declared program: the digest that a plan carries changes."""
    made = m0.program()
    seen = {made.digest}
    for field in ("name", "facts", "histories", "outputs"):
        value = {"name": "other", "facts": (("family", "x"),), "histories": (), "outputs": ()}[field]
        seen.add(dataclasses.replace(made, **{field: value}).digest)
    for i, step in enumerate(made.steps):
        for j, (name, value) in enumerate(step.params):
            changed = (*step.params[:j], (name, f"{value}?"), *step.params[j + 1 :])
            steps = (*made.steps[:i], dataclasses.replace(step, params=changed), *made.steps[i + 1 :])
            seen.add(made.with_steps(steps).digest)
    assert len(seen) == 1 + 4 + sum(len(step.params) for step in made.steps)


def test_7_02_an_overlap_survives_the_file_and_a_fresh_process(m0) -> None:
    """Offsets are serialised, never the data of scratch: in another process the histories are the same bytes again."""
    made = m0.program()
    plan = place(made)
    text = json.dumps({**plain(made), "plan": plan.to_json()})
    text = json.dumps({k: v for k, v in json.loads(text).items() if k != "facts"})
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", OVERLAP], input=text, capture_output=True, text=True, timeout=120, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    at, shared, whole = map(int, done.stdout.split())
    assert at == plan.by_name["index_history"].offset - plan.by_name["latent_history"].offset == 0
    assert shared == whole == 64 * 12
    assert len(plan.to_json()) < 40_000


def test_7_02_a_cut_plan_is_refused_at_every_byte(m0) -> None:
    text = place(m0.program()).to_json()
    for end in range(0, len(text), 3):
        with pytest.raises(BadConfig):
            Plan.from_json(text[:end])


def test_7_02_a_changed_byte_in_any_field_is_refused(m0) -> None:
    """Every value of the text changed in turn: reader or checker refuses, or it was the placer's name, which binds nothing.

    Numbers change by one cache line: a segment may end up to one line behind its last buffer.
    """
    made = m0.program()
    plan = place(made)
    tree = json.loads(plan.to_json())
    tried = accepted = 0

    def flip(value):
        return value + 64 if isinstance(value, int) else value[:-1] + ("x" if value[-1:] != "x" else "y")

    def places(node):
        if isinstance(node, dict):
            for key, value in node.items():
                yield from places(value) if isinstance(value, dict | list) else [(node, key)]
        else:
            for i, value in enumerate(node):
                yield from places(value) if isinstance(value, dict | list) else [(node, i)]

    for node, key in list(places(tree)):
        old = node[key]
        node[key] = flip(old)
        tried += 1
        try:
            check(made, Plan.from_json(json.dumps(tree)))
            accepted += 1
            assert key == "placer", (key, old)
        except UserError:
            pass
        node[key] = old
    assert accepted == 1
    assert tried > 300


def test_7_02_two_writers_of_one_folder(tmp_path: Path) -> None:
    """Whoever is first publishes a complete folder by one rename; the other is refused and leaves nothing."""
    results: list[object] = []

    def write() -> None:
        try:
            results.append(make("micro", tmp_path / "one"))
        except UserError as error:
            results.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(found, Path) for found in results) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_7_04_no_copy_is_optimised_away(m0) -> None:
    """There is no compiler between a step and its bytes: every mutated buffer is mutated, seen from outside the step."""
    seen = {}

    def before(step, call, chunk):
        seen[step.name] = {role: call.raws[role].clone() for role, _ in (*step.writes, *step.updates)}

    def after(step, call, chunk):
        seen[step.name] = any(not m0.same(old, call.raws[role]) for role, old in seen[step.name].items())

    def main(session):
        m0.fill_reusable(session, 0x33)
        session.prefill(m0.hidden(16), 0, hooks=m0.Watch(before={"*": before}, after={"*": after}))
        return dict(seen)

    (found,) = m0.run(main)
    assert set(found) == {step.name for step in m0.program().steps}
    assert all(found.values()), found


def test_7_05_planning_needs_no_device_and_no_tensor_library() -> None:
    """A plan is made in a process that can import neither torch nor numpy."""
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from palimpsest.recipes import load_geometry, default_formats, program\n"
        "from palimpsest.core.spec import Limits\nfrom palimpsest.plan.place import place\n"
        "g = load_geometry('glm-5.2')\nprint(place(program(g, Limits(65536, 4096, 8), default_formats(g), 0)).total)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
