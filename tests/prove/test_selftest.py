"""The self-test: its table is complete, its judgement is strict, and a gate without a body makes it fail."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palimpsest.cli.main import main
from palimpsest.prove import licence, selftest
from palimpsest.prove.gates import GATES
from palimpsest.prove.mutants import BY_ID, MUTANTS, OUTSIDE, PARTS, PHASES, Mutant
from palimpsest.prove.mutations_output import ACTIONS, PLANS, TOOLS
from palimpsest.prove.selftest_run import TOLD, Bench

#: cheapest first
KINDS = ("plan", "tool", "layer", "ranks")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def without(bench: Bench) -> Iterator[Bench]:
    yield bench
    bench.without = frozenset()


def cheapest(gate: str) -> Mutant:
    """The mutant designated to a gate that costs the least."""
    found = [m for m in MUTANTS if gate in m.gates]
    return min(
        found, key=lambda m: (m.alone or m.action == "stopped", KINDS.index(m.kind), len(m.gates), len(m.parts), len(m.cases))
    )


def test_the_table_is_complete() -> None:
    assert len(BY_ID) == len(MUTANTS)
    assert {m.number for m in MUTANTS} >= set(selftest.NUMBERS) - {"M47"}
    designated = {gate for m in MUTANTS for gate in m.gates}
    assert designated - set(OUTSIDE) == set(GATES)
    assert all(m.gates for m in MUTANTS if not m.control)
    assert {m.argument for m in MUTANTS if m.action == "killed"} == set(PHASES)
    assert all(set(m.parts) <= set(PARTS) for m in MUTANTS)


def test_selection_and_output_mutants_come_in_both_forms() -> None:
    for number in ("M27", "M28", "M29", "M33", "M34", "M36", "M37", "M38", "M39"):
        assert {m.form for m in MUTANTS if m.number == number} == {"alias-only", "common-mode"}


def test_every_action_exists() -> None:
    for mutant in MUTANTS:
        known: Any = {"plan": PLANS, "tool": TOOLS | {"wide_bound": 0}, "layer": ACTIONS}.get(mutant.kind)
        assert known is None or mutant.action in known, mutant.id
    assert {m.action for m in MUTANTS if m.kind == "ranks"} >= set(TOLD)


@pytest.mark.parametrize("gate", list(GATES))
def test_a_gate_without_a_body_makes_the_self_test_fail(without: Bench, gate: str) -> None:
    mutant = cheapest(gate)
    without.without = frozenset((gate,))
    answer = without.run(mutant)
    matrix = selftest.judge([answer], source="s", elapsed_s=0, complete=False)
    assert matrix["verdict"] == "FAIL"
    assert gate in matrix["mutants"][0]["missing"]
    assert matrix["survivors"] == [mutant.id]


@pytest.mark.parametrize("id_", ["M03", "M19", "M28/common", "M30", "M36/common", "M40", "V2", "OK4", "OK5"])
def test_a_mutant_is_killed_and_a_control_is_not(bench: Bench, id_: str) -> None:
    row = selftest.judge([bench.run(BY_ID[id_])], source="s", elapsed_s=0, complete=False)["mutants"][0]
    assert row["missing"] == [], row


def answers() -> list[dict[str, Any]]:
    """What perfect workers would say: every mutant killed by its designated gates alone."""
    return [
        {"id": m.id, "verdicts": {**dict.fromkeys(GATES, "PASS"), **dict.fromkeys(m.gates, "FAIL")}, "why": {}} for m in MUTANTS
    ]


def test_a_perfect_matrix_passes_and_licenses_its_source() -> None:
    matrix = selftest.judge(answers(), source="a" * 64, elapsed_s=1, complete=True)
    assert (matrix["verdict"], matrix["survivors"], matrix["dead"]) == ("PASS", [], [])
    assert matrix["score"]["killed"] == matrix["score"]["of"] == 48
    raw = json.dumps(matrix).encode()
    assert licence.licensed(raw, "a" * 64)
    assert not licence.licensed(raw, "b" * 64)


def test_a_survivor_a_failing_control_a_stopped_run_and_a_dead_gate_fail() -> None:
    for id_, verdicts, name in (
        ("M03", {"S7": "PASS"}, "survivors"), ("OK4", {"K2": "FAIL"}, "survivors"), ("M03", {"stopped": "ERROR"}, "survivors"),
        ("O3", {"O2": "FAIL"}, "dead"),
    ):  # fmt: skip
        told = answers()
        next(a for a in told if a["id"] == id_)["verdicts"].update(verdicts)
        if name == "dead":
            next(a for a in told if a["id"] == "M36/common")["verdicts"].update(verdicts)
        matrix = selftest.judge(told, source="s", elapsed_s=1, complete=True)
        assert matrix["verdict"] == "FAIL"
        assert matrix[name]
    assert selftest.judge(answers()[:5], source="s", elapsed_s=1, complete=False)["verdict"] == "FAIL"


def test_the_verb_shows_keeps_and_returns_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for good in (True, False):
        told = answers() if good else answers()[1:]
        matrix = selftest.judge(told, source="s", elapsed_s=1, complete=good)
        monkeypatch.setattr(selftest, "run", lambda progress, m=matrix: m)
        assert main(["qualify", "--self-test", "--evidence", str(tmp_path)]) == (0 if good else 1)
        out, err = capsys.readouterr()
        assert "kill matrix" in out
        assert selftest.summary(matrix) in err
        assert licence.read(tmp_path / licence.FILE)[0]["verdict"] == matrix["verdict"]
    assert main(["qualify", "--self-test", "--ranks", "4"]) == 2


def test_workers_report_and_a_part_licenses_nothing() -> None:
    seen: list[str] = []
    matrix = selftest.run(
        ["M04", "M03", "V5"], workers=2, progress=lambda done, total, mutant, well: seen.append(f"{mutant} {well}")
    )
    assert sorted(seen) == ["M03 True", "M04 True", "V5 True"]
    assert (matrix["survivors"], matrix["complete"], matrix["verdict"]) == ([], False, "FAIL")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_self_test_passes() -> None:
    matrix = selftest.run()
    assert matrix["verdict"] == "PASS", selftest.summary(matrix)
