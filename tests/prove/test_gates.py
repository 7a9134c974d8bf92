"""The verdict algebra, cells and sheets, and the gates that work on plans and numbers alone: each shown to fail."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from palimpsest.core.geometry import Formats
from palimpsest.core.spec import Limits
from palimpsest.plan.place import place
from palimpsest.plan.plan import Plan
from palimpsest.prove import gates_select, gates_storage
from palimpsest.prove.capture import Compared, Observation
from palimpsest.prove.gates import ABSENT, GATES, SEAL, VERDICTS, Cell, Sheet, combine, worse
from palimpsest.prove.scores import RowScores
from palimpsest.prove.writeset import common, merge, outside
from palimpsest.recipes.blocks import layer_program
from palimpsest.run.meters import Mapped


def test_the_worse_verdict_wins() -> None:
    assert [worse(a, b) for a in VERDICTS for b in VERDICTS] == [VERDICTS[max(i, j)] for i in range(4) for j in range(4)]


def test_no_cell_is_an_error() -> None:
    assert combine([]) == "ERROR"
    assert combine(["PASS", "PASS"]) == "PASS"
    assert combine(["PASS", "FAIL", "INCONCLUSIVE"]) == "FAIL"


def test_gates_of_this_issue_are_registered_and_the_others_are_absent() -> None:
    wanted = "S1 S2 S3 S4 S5 S6 A1 A2 A3 X1 X2 X3 X4 X5 X6 K1 K2 K3 K4 K5 K6 O0 O1 O1s O2 O6 V1 V2 V3 V5"
    assert set(wanted.split()) <= set(GATES)
    assert not set(GATES) & set(ABSENT)


def test_a_cell_that_checked_too_little_is_an_error() -> None:
    cell = Cell("K1", n_expected=5)
    cell.passed(4)
    cell.close()
    assert cell.verdict == "ERROR"
    assert cell.first_failure == "checked 4 of 5 rows"


def test_the_first_failure_and_the_worst_verdict_stay() -> None:
    cell = Cell("K1", n_expected=3)
    cell.fail(1, "first", "INCONCLUSIVE")
    cell.fail(1, "second")
    cell.check(True, 1, "never")
    cell.extreme(0.5)
    cell.extreme(0.25)
    assert cell.flag("C01", 3) == {
        "case": "C01", "rank": 3, "gate": "K1", "verdict": "FAIL", "n_expected": 3, "n_checked": 3, "n_bytes": 0,
        "worst": (0.5).hex(), "first_failure": "first",
    }  # fmt: skip


def test_v1_counts_the_cells_of_a_case() -> None:
    sheet = Sheet("C01", 0)
    sheet.expect("K1", 2)
    sheet.expect("K6", 0)
    sheet.cell("K1").passed(2)
    flags = sheet.close()
    assert [(f["gate"], f["verdict"], f["n_checked"]) for f in flags] == [("K1", "PASS", 2), ("V1", "PASS", 1)]


def test_v1_fails_when_a_gate_was_not_run() -> None:
    sheet = Sheet("C01", 0)
    sheet.expect("K1", 2)
    assert {f["gate"]: f["verdict"] for f in sheet.close()} == {"K1": "ERROR", "V1": "FAIL"}


def test_the_seal_has_no_v1() -> None:
    sheet = Sheet(SEAL, 0)
    sheet.expect("S1", 1)
    sheet.cell("S1").passed(1)
    assert [f["gate"] for f in sheet.close()] == ["S1"]


def test_spans() -> None:
    assert merge([(4, 6), (0, 2), (1, 3)]) == [(0, 3), (4, 6)]
    assert outside([(0, 3), (4, 6)], 8) == [(3, 4), (6, 8)]
    assert outside([], 3) == [(0, 3)]
    assert common([(0, 3), (4, 6)], [(2, 5)]) == [(2, 3), (4, 5)]


@pytest.fixture
def planned(make_geometry):
    """(program, base plan, alias plan, bytes of an index record)."""
    program = layer_program(make_geometry(), Limits(4096, 64, 4, 16), Formats(), 0)
    return program, place(program, "off"), place(program, "on"), 132


def sealed(plan: Plan, program, arrangement: str) -> Sheet:
    sheet = Sheet(SEAL, 0)
    gates_storage.seal_plan(sheet, plan, program, arrangement)
    return sheet


def moved(plan: Plan, buffer: str, by: int) -> Plan:
    places = tuple(dataclasses.replace(p, offset=p.offset + by) if p.buffer == buffer else p for p in plan.places)
    return dataclasses.replace(plan, places=places)


def test_both_plans_pass_the_seal_gates(planned) -> None:
    program, base, alias, _ = planned
    for plan, name in ((base, "base"), (alias, "alias")):
        assert {g: c.verdict for g, c in sealed(plan, program, name).cells.items()} == {"S1": "PASS", "S2": "PASS", "S3": "PASS"}


@pytest.mark.parametrize(
    ("name", "buffer", "by", "gate"),
    [
        ("alias", "index_history", 1, "S2"),
        ("alias", "index_history", 64, "S3"),
        ("alias", "latent_history", 64, "S3"),
        ("base", "index_history", -65536, "S3"),  # onto the queries, which are alive then
        ("base", "index_history", 64, "S1"),
        ("alias", "staging", 64, "S1"),
    ],
)
def test_a_shifted_view_is_caught(planned, name: str, buffer: str, by: int, gate: str) -> None:
    program, base, alias, _ = planned
    sheet = sealed(moved(base if name == "base" else alias, buffer, by), program, name)
    assert sheet.cells[gate].verdict == "FAIL"


def test_an_alias_that_was_lost_is_caught(planned) -> None:
    program, base, _, record = planned
    assert sealed(base, program, "alias").cells["S3"].verdict == "FAIL"
    sheet = Sheet(SEAL, 0)
    gates_storage.saving(sheet, base, base, requested={"base": base.total, "alias": base.total}, record=record)
    assert sheet.cells["A1"].verdict == "FAIL"


def test_the_saving_is_exact_by_plan_and_by_arena(planned) -> None:
    _, base, alias, record = planned
    for off, verdict in ((0, "PASS"), (1, "FAIL")):
        sheet = Sheet(SEAL, 0)
        gates_storage.saving(sheet, base, alias, requested={"base": base.total + off, "alias": alias.total}, record=record)
        assert sheet.cells["A1"].verdict == verdict


def mappings(plan: Plan) -> list[Mapped]:
    found, at = [], 1 << 30
    for segment in plan.segments:
        size = -(-segment.nbytes // 4096) * 4096
        found.append(Mapped(f"palimpsest-{segment.kind}", 7, at, at + size, "rw-s", size, size))
        at += size
    return found


def test_mapped_bytes_are_itemised(planned) -> None:
    _, base, alias, _ = planned
    plans, good = {"base": base, "alias": alias}, {"base": mappings(base), "alias": mappings(alias)}
    extra = Mapped("palimpsest-extra", 8, 0, 2 << 20, "rw-s", 0, 0)
    short = [dataclasses.replace(m, pss=m.pss - 4096) for m in good["alias"]]
    for found, verdict in (
        (good, "PASS"),
        (good | {"alias": [*good["alias"], extra]}, "FAIL"),
        (good | {"alias": short}, "FAIL"),
    ):
        sheet = Sheet(SEAL, 0)
        gates_storage.mapped_bytes(sheet, found, plans)
        assert sheet.cells["A2"].verdict == verdict


def test_the_lint_gate_reads_every_file_once_over_the_ranks(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"m{number}.py").write_text("x = 1\n")
    (tmp_path / "m3.py").write_text("ok = abs(a - b) < 1e-6\n")
    verdicts = []
    for rank in range(2):
        sheet = Sheet(SEAL, rank)
        assert gates_storage.lint(sheet, tmp_path, rank, 2) == 5
        verdicts.append(sheet.close()[0]["verdict"])
    assert verdicts == ["PASS", "FAIL"]


def test_the_qualifier_itself_holds_no_tolerance() -> None:
    sheet = Sheet(SEAL, 0)
    folder = Path(gates_storage.__file__).parent
    assert gates_storage.lint(sheet, folder, 0, 1) > 20
    assert sheet.close()[0]["verdict"] == "PASS"


class Shifted:
    """An arena in which one buffer is not where the plan puts it."""

    def __init__(self, view: int, planned: int):
        self.plan = type("P", (), {"places": [type("Q", (), {"buffer": "ids"})()]})()
        self._view, self._planned = view, planned

    def raw(self, buffer: str):
        return type("T", (), {"data_ptr": lambda _: self._view})()

    def address(self, buffer: str) -> int:
        return self._planned


def test_a_view_that_moved_is_named() -> None:
    assert gates_storage.moved(Shifted(64, 64), {"ids": 64}) == []
    assert gates_storage.moved(Shifted(65, 64), {"ids": 64}) == ["ids is at 0x41, sealed at 0x40, planned at 0x40"]
    assert gates_storage.moved(Shifted(64, 65), {"ids": 64}) == ["ids is at 0x40, sealed at 0x40, planned at 0x41"]


WANTED = {"tie_rows": 2, "sides": 2, "shards": 2, "zero_rows": 1, "pads": 0, "boundary": 3}


@pytest.mark.parametrize(
    ("name", "gates"), [("tie_rows", {"K6", "V3"}), ("sides", {"K6", "V3"}), ("zero_rows", {"K6", "V3"}), ("boundary", {"V3"})]
)
def test_a_case_that_does_not_show_what_it_must_is_inconclusive(name: str, gates: set[str]) -> None:
    for short in (0, 1):
        sheet = Sheet("C03", 0)
        gates_select.minima(sheet, WANTED, WANTED | {name: WANTED[name] - short})
        assert {g for g, c in sheet.cells.items() if c.verdict == "INCONCLUSIVE"} == (gates if short else set())
        assert {g: c.n_checked for g, c in sheet.cells.items()} == {"K6": 4, "V3": 5}


def observation(**changes) -> Observation:
    """A replay of one row of one rank in which nothing is wrong."""
    o = Observation(history=10, rows=1, first_row=0, own=1, prepared=2)
    o.copies = {"ids": np.array([[3], [-1]], np.int32).view(np.uint8), "counts": np.array([1, 0], np.int32).view(np.uint8)}
    o.scores = {0: RowScores(11, b"", 0.0, 0.0, 0)}
    o.inputs_before = o.inputs_after = (b"a", b"b", b"c")
    o.poisoned = o.overwritten = 1
    o.index = o.latent = Compared(11, 0, None)
    for name, value in changes.items():
        setattr(o, name, value)
    return o


@pytest.mark.parametrize(
    ("changes", "gates"),
    [
        ({}, set()),
        ({"moved": ["x is elsewhere"]}, {"S4"}),
        ({"early_damage": (0, 4)}, {"S6"}),
        ({"end_damage": (0, 4)}, {"S6", "V2"}),
        ({"allocated": ["8 bytes"]}, {"A3"}),
        ({"index": Compared(11, 0, 5)}, {"X4"}),
        ({"scores": {0: RowScores(10, b"", 0.0, 0.0, 0)}}, {"X4"}),
        ({"scores": {}}, {"X4"}),
        ({"complaints": ["row 0: out of order"]}, {"X4"}),
        ({"inputs_after": (b"a", b"x", b"c")}, {"X6"}),
        ({"poisoned": 0}, {"V2"}),
        ({"overwritten": 0}, {"V2"}),
    ],
)
def test_each_fact_of_a_replay_has_its_gate(changes, gates: set[str]) -> None:
    sheet = Sheet("C01", 0)
    gates_storage.case_gates(sheet, observation(**changes), views=3, slack=[], tokens_rows=2, where="test")
    assert {g for g, c in sheet.cells.items() if c.verdict != "PASS"} == gates


def test_a_damaged_red_zone_fails_the_write_set_gate() -> None:
    sheet = Sheet("C01", 0)
    gates_storage.case_gates(sheet, observation(), views=3, slack=["reusable segment: byte 7"], tokens_rows=2, where="test")
    assert sheet.cells["S6"].verdict == "FAIL"
