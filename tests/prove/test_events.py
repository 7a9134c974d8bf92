"""The event log: vector clocks by hand, orders that hold and orders that do not, by both evaluators."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from harness import job, qualify_locally

from palimpsest.core.errors import EvidenceError
from palimpsest.kernels.call import Call, Chunk, Implementation
from palimpsest.prove.assemble import assemble
from palimpsest.prove.events import Pair, Schedule, Stuck, clocks, dynamic, static
from palimpsest.prove.gates import Sheet
from palimpsest.prove.rank_setup import Setup
from palimpsest.prove.verify_events import check_events

SCHEDULE = Schedule(
    (Pair("early", "late", True),), {"read": frozenset({"early"}), "meet": frozenset(), "write": frozenset({"late"})}, ("meet",)
)


def log(*, meet: bool = True, signals: tuple[int, int] = (3, 4)) -> list[list[Any]]:
    met = [["meet", "barrier", "barrier meet"]] if meet else []
    return [
        ["begin", "p3", "read"], ["end", "p3", "read"],
        ["signals", "barrier", "meet", [signals[0]]], ["begin", "barrier", "meet"],
        *met,
        ["end", "barrier", "meet"], ["signals", "barrier", "meet", [signals[1]]], ["begin", "p6", "write"],
        ["end", "p6", "write"],
    ]  # fmt: skip


def found(logs: list[list[list[Any]]], rank: int = 0) -> tuple[str, str | None]:
    sheet = Sheet("C01", rank)
    sheet.expect("S7", SCHEDULE.units(len(logs)))
    dynamic(sheet, SCHEDULE, logs, rank, "here")
    flag = sheet.close()[0]
    return str(flag["verdict"]), flag["first_failure"]  # type: ignore[return-value]


def test_a_parcel_orders_its_sender_before_its_receiver_only() -> None:
    sender = [["begin", "p", "a"], ["exchange", "p", "x", [1], []], ["begin", "p", "b"]]
    receiver = [["begin", "p", "c"], ["exchange", "p", "x", [], [0]], ["begin", "p", "d"]]
    made = clocks([sender, receiver])
    assert made[1] == [[0, 1], [1, 2], [1, 3]]
    assert made[0] == [[1, 0], [2, 0], [3, 0]]


def test_a_meeting_orders_everything_before_it_before_everything_after_it() -> None:
    made = clocks([log(), log()])
    assert made[0][7][1] == 4
    assert found([log(), log()]) == ("PASS", None)


def test_a_missing_barrier_fails_though_no_rank_was_late() -> None:
    verdict, text = found([log(meet=False), log(meet=False)])
    assert verdict == "FAIL"
    assert text == "here: early on rank 1 is not done before rank 0 starts on late"


def test_swapped_steps_fail_on_the_rank_itself() -> None:
    turned = log()
    turned = [*turned[-2:], *turned[:-2]]
    assert found([turned, log()])[0] == "FAIL"


def test_signals_that_do_not_advance_fail() -> None:
    verdict, text = found([log(signals=(3, 3)), log()])
    assert verdict == "FAIL"
    assert "one generation up" in str(text)


@pytest.mark.parametrize("logs", [[log(meet=False), log()], [[["exchange", "p", "x", [], [1]]], []]], ids=["meeting", "parcel"])
def test_an_impossible_log_is_stuck(logs: list[list[list[Any]]]) -> None:
    with pytest.raises(Stuck, match="waits for ever"):
        clocks(logs)


def test_the_static_schedule_fails_without_a_global_step_and_out_of_order(tmp_path: Path) -> None:
    setup = Setup(job(tmp_path))
    program, plan = setup.program, setup.plans["alias"]
    schedule = Schedule.of(program, plan)
    for steps, verdict in (
        (program.steps, "PASS"),
        (tuple(s for s in program.steps if s.scope != "all"), "FAIL"),
        (tuple(sorted(program.steps, key=lambda s: s.name == "index_select")), "FAIL"),
    ):
        sheet = Sheet("seal", 0)
        static(
            sheet,
            program.with_steps(steps),
            Schedule(schedule.pairs, schedule.touches, tuple(s.name for s in steps if s.scope == "all")),
            "alias",
        )
        assert sheet.cell("S7").verdict == verdict


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]], dict[Any, Any]]:
    """A record of two cases, its event lines, its cells; the rows of C06 give one rank nothing to do."""
    made = job(tmp_path_factory.mktemp("events"), "C02", "C06")
    results = qualify_locally(made)
    source = {"dirty": False, "package_digest": "0" * 64}
    record, flags, _ = assemble(Setup(made), results, run_id="0" * 12, source=source, synthetic=True, elapsed_ns=1, failure=None)
    lines = json.loads(json.dumps([line for r in results for line in r["events"]]))
    return record, lines, {(f["case"], f["rank"], f["gate"]): f for f in flags}


def test_the_independent_reader_agrees(run: Any) -> None:
    record, lines, cells = run
    assert check_events(lines, record, cells) == sum(len(line["events"]) for line in lines)


def test_the_independent_reader_sees_a_removed_barrier(run: Any) -> None:
    record, lines, cells = copy.deepcopy(run)
    for line in lines:
        line["events"] = [e for e in line["events"] if e[2] != "barrier selection_barrier"]
    with pytest.raises(EvidenceError, match=r"yet the S7 cell of rank \d passed"):
        check_events(lines, record, cells)


@pytest.mark.parametrize("damage", ["line", "parcel", "shape"])
def test_the_independent_reader_refuses_a_damaged_log(run: Any, damage: str) -> None:
    record, lines, cells = copy.deepcopy(run)
    if damage == "line":
        lines.pop()
    elif damage == "parcel":
        events = lines[0]["events"]
        events.remove(next(e for e in events if e[0] == "exchange"))
    else:
        lines[0]["events"][0] = ["begin"]
    with pytest.raises(EvidenceError, match=r"events\.jsonl"):
        check_events(lines, record, cells)


def test_a_barrier_that_does_nothing_is_caught_where_the_data_is_right(tmp_path: Path) -> None:
    def mutant(arrangement: str, op: str, inner: Implementation, call: Call, chunk: Chunk) -> None:
        if op == "barrier":
            call.view("signals").add_(1)
        else:
            inner(call, chunk)

    results = qualify_locally(job(tmp_path, "C06"), mutant)
    assert {f["gate"] for r in results for f in r["flags"] if f["verdict"] != "PASS"} == {"S7"}
