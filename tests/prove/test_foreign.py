"""Kernels from outside: loaded only by name, judged by gates that need nothing from them, accepted where a tie is proved and
nowhere else.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from harness import failing, job, qualify_locally, verdicts

from palimpsest.core.canon import canonical
from palimpsest.core.errors import BadConfig, EvidenceError, RankError, UnknownName
from palimpsest.prove import foreign
from palimpsest.prove.cases import Profile
from palimpsest.prove.evidence import EvidenceFolder, manifest_text, new_run_id
from palimpsest.prove.foreign_run import spilled
from palimpsest.prove.gates import GATES, SEAL, Sheet
from palimpsest.prove.liveness import GATES_L
from palimpsest.prove.qualify import Outcome, Request, publish
from palimpsest.prove.rank_setup import Job, Setup
from palimpsest.prove.verify import verify

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_kernel"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples' folder and this one; nothing stays imported."""
    before = set(sys.modules)
    for folder in (EXAMPLES, Path(__file__).parent):
        monkeypatch.syspath_prepend(folder)
    yield
    for name in ("own_selectors", "foreign_kernels"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


def run(made: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(results, certificates) of a run."""
    results = qualify_locally(made)
    paths = [spilled(Path(made.workdir), rank) for rank in range(made.profile.ranks)]
    return results, [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def parents_cells(rank: int) -> list[dict[str, Any]]:
    """What a parent of real rank processes adds; here there are none."""
    sheet = Sheet(SEAL, rank)
    for gate in GATES_L:
        sheet.expect(gate, 1)
        sheet.cell(gate).passed(1)
    return sheet.close()


def test_topk_on_the_full_row_qualifies(place: Path) -> None:
    results, _ = run(job(place, "C01", "C03", "C04", kernels={"index_select": "own_selectors:topk_row"}))
    found = verdicts(results)
    assert failing(results) == set()
    assert "K7" in found
    assert not {"K2", "K3", "K5"} & set(found)


def test_random_tie_order_passes_with_certificates(place: Path) -> None:
    results, certificates = run(job(place, "C03", "C09", "C10", "C11", kernels={"index_select": "own_selectors:random_ties"}))
    assert failing(results) == set()
    between = {tuple(c["between"]) for c in certificates}
    assert between == {("base", "alias"), ("rule", "alias")}
    members = [m for c in certificates for m in c["certificate"]["members"]]
    assert len(members) > 100
    assert {m["class"] for m in members} == {"exact_tie"}


def test_off_by_one_is_caught_by_k7(place: Path) -> None:
    results, certificates = run(job(place, "C02", kernels={"index_select": "own_selectors:off_by_one"}))
    assert failing(results) == {"K7"}
    text = next(f["first_failure"] for r in results for f in r["flags"] if f["gate"] == "K7")
    assert "1 ids above the cutoff are missing" in text
    assert "was left out" in text
    assert not certificates


@pytest.mark.parametrize(
    ("name", "gates"),
    [
        ("one_ulp", {"K7"}),
        ("duplicate", {"K1", "K7"}),
        ("invisible", {"K1", "K7"}),
        ("one_fewer", {"K1", "K7", "X4"}),
        ("stale", {"K7"}),
    ],
)
def test_a_wrong_selector_is_caught(place: Path, name: str, gates: set[str]) -> None:
    results, _ = run(job(place, "C02", kernels={"index_select": f"foreign_kernels:{name}"}))
    assert gates <= failing(results)


def test_a_contract_form_selector_is_held_to_every_other_gate(place: Path) -> None:
    results, _ = run(job(place, "C05", kernels={"index_select": "foreign_kernels:ours"}))
    assert failing(results) == set()


def test_a_contract_form_kernel_may_not_allocate(place: Path) -> None:
    with pytest.raises(RankError, match="outside the plan"):
        run(job(place, "C05", kernels={"index_select": "foreign_kernels:allocates"}))


def test_attention_from_outside(place: Path) -> None:
    results, _ = run(job(place, "C01", "C05", kernels={"sparse_attend": "foreign_kernels:attend"}))
    assert failing(results) == set()


@pytest.mark.parametrize("name", ["attend_scaled_twice", "attend_drops_one"])
def test_wrong_attention_is_caught_by_the_oracle(place: Path, name: str) -> None:
    results, _ = run(job(place, "C02", kernels={"sparse_attend": f"foreign_kernels:{name}"}))
    assert "O2" in failing(results)


@pytest.mark.parametrize("op", ["gather_history", "append_index", "reduce_output"])
def test_other_ops_must_write_the_engines_bytes(place: Path, op: str) -> None:
    results, _ = run(job(place, "C05", kernels={op: f"foreign_kernels:same_{op}"}))
    assert failing(results) == set()
    assert verdicts(results)["B1"] == "PASS"


def test_a_foreign_append_that_changes_a_byte_is_caught_by_b1_alone(place: Path) -> None:
    """The recorded tail runs the same wrong kernel, so nothing else can see it."""
    results, _ = run(job(place, "C02", kernels={"append_latent": "foreign_kernels:append_latent_wrong"}))
    assert failing(results) == {"B1"}


def test_what_comes_back_must_have_the_shape(place: Path) -> None:
    with pytest.raises(RankError, match=r"foreign_kernels:transposed returned \[.*\] int64; integers \[.*\] are wanted"):
        run(job(place, "C02", kernels={"index_select": "foreign_kernels:transposed"}))


def test_ids_of_any_order_are_sorted_and_nothing_else(place: Path) -> None:
    from palimpsest.prove.foreign_form import _ids

    kernel = foreign.load("index_select", "own_selectors:topk_row")
    found = _ids(np.asarray([[5, -1, 3], [7, 7, -2]]), 2, 4, kernel)
    assert found.tolist() == [[3, 5, -1, -1], [-2, 7, 7, -1]]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("index_select", "OP=module:function is wanted"),
        ("index_select=os.system", "OP=module:function is wanted"),
        ("index_select=a b:c", "OP=module:function is wanted"),
        ("index_select=../x:c", "OP=module:function is wanted"),
        ("barrier=a:b", "cannot be qualified"),
        ("nothing=a:b", "unknown op 'nothing'"),
    ],
)
def test_bad_names(word: str, text: str) -> None:
    with pytest.raises((BadConfig, UnknownName), match=text):
        foreign.parse([word])


def test_an_op_twice() -> None:
    with pytest.raises(BadConfig, match="given twice"):
        foreign.parse(["index_select=a:b", "index_select=a:c"])


@pytest.mark.parametrize(
    ("op", "name", "text"),
    [
        ("index_select", "no_such_module_here:f", "failed with ModuleNotFoundError"),
        ("index_select", "foreign_kernels:nothing", "has no function nothing"),
        ("index_select", "foreign_kernels:NUMBER", "has no function NUMBER"),
        (
            "index_select",
            "foreign_kernels:attend",
            r"takes \(query, records, ids, counts, scale\); \(call, chunk\) or \(keys, scales",
        ),
        ("append_index", "own_selectors:topk_row", r"\(call, chunk\) is wanted"),
        ("index_select", "foreign_broken:f", "failed with ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_loaded(op: str, name: str, text: str) -> None:
    with pytest.raises(BadConfig, match=text) as caught:
        foreign.load(op, name)
    assert "\n" not in str(caught.value)


def test_nothing_is_imported_without_the_flag(place: Path) -> None:
    Setup(job(place, "C02"))
    assert "own_selectors" not in sys.modules


def test_every_op_has_a_rule_and_every_foreign_gate_exists() -> None:
    from palimpsest.kernels.table import OPS

    assert set(foreign.RULES) == set(OPS) - {"barrier"}
    assert set(GATES) >= foreign.FOREIGN_GATES == {"K7", "B1"}
    assert not foreign.FOREIGN_GATES & set(foreign.gates_of([]))
    assert "K2" not in foreign.gates_of(["index_select"])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """A whole run with random tie order, published."""
    sys.path.insert(0, str(EXAMPLES))
    place = tmp_path_factory.mktemp("evidence")
    made = job(place, kernels={"index_select": "own_selectors:random_ties"}, profile=Profile("small", 512, 16, 2, 16))
    results = [result | {"flags": result["flags"] + parents_cells(rank)} for rank, result in enumerate(qualify_locally(made))]
    with EvidenceFolder(place / "evidence", new_run_id()) as folder:
        yield publish(folder, Setup(made), results, request=Request(model=Path(made.model)), elapsed_ns=1)
    sys.path.remove(str(EXAMPLES))


def test_the_reader_agrees_and_replays_every_certificate(outcome: Outcome) -> None:
    found = verify(outcome.folder)
    assert found.gates_verdict == "PASS" == outcome.record["gates_verdict"]
    assert found.certificates == outcome.record["selection"]["rows_changed"] + outcome.record["selection"]["rows_reordered"] > 20
    (kernel,) = outcome.record["kernels"]
    assert (kernel["op"], kernel["form"], kernel["gates_extra"], kernel["file"]) == (
        "index_select",
        "plain",
        ["K7"],
        "own_selectors.py",
    )
    assert "index_select was own_selectors:random_ties" in outcome.record["claim"]


def test_the_report_of_a_real_record(outcome: Outcome, tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="the report needs the extra: pip install palimpsest[report]")
    from palimpsest.report.qualify_html import write_report

    text = write_report(outcome.folder, tmp_path / "report.html").read_text()
    for words in ("own_selectors:random_ties", "C11 queued replay 3", "exact_tie", "index_history", "tie certificates"):
        assert words in text, words


def _edit(outcome: Outcome, tmp_path: Path, change: Any) -> Path:
    import shutil

    folder = Path(shutil.copytree(outcome.folder, tmp_path / "copy"))
    lines = [json.loads(line) for line in (folder / "ties.jsonl").read_text().splitlines()]
    change(lines)
    (folder / "ties.jsonl").write_text("".join(canonical(line) + "\n" for line in lines))
    _seal(folder)
    return folder


def _seal(folder: Path) -> None:
    (folder / "MANIFEST.sha256").write_text(
        manifest_text(folder, [p.name for p in folder.iterdir() if p.name != "MANIFEST.sha256"])
    )


@pytest.mark.parametrize("what", ["record byte", "claimed score", "dropped line", "other gate"])
def test_an_edited_certificate_is_refused(outcome: Outcome, tmp_path: Path, what: str) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        line = lines[0]
        if what == "record byte":
            key, raw = next(iter(line["records"].items()))
            line["records"][key] = ("00" if raw[:2] != "00" else "01") + raw[2:]
        elif what == "claimed score":
            line["certificate"]["members"][0]["mantissa"] += 2
        elif what == "dropped line":
            del lines[0]
        else:
            line["between"] = ["alias", "base"]

    with pytest.raises(EvidenceError, match=r"ties\.jsonl"):
        verify(_edit(outcome, tmp_path, change))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["kernels"].clear(),
        lambda r: r["kernels"][0].update(op="sparse_attend", steps=["sparse_attend"]),
        lambda r: r["kernels"][0].update(steps=["index_select", "index_select"]),
    ],
)
def test_a_record_that_hides_its_kernel_is_refused(outcome: Outcome, tmp_path: Path, change: Any) -> None:
    folder = _edit(outcome, tmp_path, lambda lines: None)
    record = json.loads((folder / "record.json").read_text())
    change(record)
    (folder / "record.json").write_text(canonical(record) + "\n")
    _seal(folder)
    with pytest.raises(EvidenceError):
        verify(folder)
