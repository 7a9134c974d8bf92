"""The gates of a qualification: their ids, what each must prove, and the algebra of verdicts.

A gate returns one of PASS < INCONCLUSIVE < FAIL < ERROR with counters. Cells (case x rank x gate) combine by maximum and only
all-PASS is a pass. There is no skip, no retry and no tolerance here: what can be exact is compared as bytes, the rest against
bounds derived in ``bounds.py``. The evaluations live beside this file in ``gates_*.py``; ``verify.py`` re-derives the verdict
without importing any of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

#: from best to worst; a cell's verdict is the worst it met
VERDICTS = ("PASS", "INCONCLUSIVE", "FAIL", "ERROR")

#: the pseudo case that holds what is proved once, when both arrangements are prepared
SEAL = "seal"


@dataclass(frozen=True)
class Gate:
    """One gate: ``scope`` is ``seal`` (once per rank), or ``case`` (once per case and rank; S7 has a cell at the seal too)."""

    id: str
    scope: str
    proves: str
    unit: str


_TABLE = (
    Gate("S1", "seal", "every view lies inside its segment", "views of both arrangements"),
    Gate("S2", "seal", "every view starts on its alignment", "views of both arrangements"),
    Gate(
        "S3",
        "seal",
        "the pairs that share bytes are exactly the planned ones, and the histories share exactly when planned",
        "pairs of views",
    ),
    Gate(
        "S9", "seal", "views keep arena, offset, shape, strides, dtype and sharing in a fresh process", "views and sharing pairs"
    ),
    Gate("S10", "seal", "staging, tables and signals lie in no reusable or persistent byte", "views"),
    Gate(
        "S8", "seal", "every byte a step reads was written in this epoch by its declared writer", "reads of replays of their own"
    ),
    Gate("A1", "seal", "logical bytes of base minus alias are exactly the index history", "planned and requested totals"),
    Gate("A2", "seal", "mapped bytes differ by named mappings only; proportional set size equals the plan", "mappings"),
    Gate("A4", "seal", "replays run under a cap at the sealed size, and a late allocation fails under it", "conditions"),
    Gate(
        "A5", "seal", "at three context lengths planned bytes follow the formula and mapped bytes follow the plan", "conditions"
    ),
    Gate("A6", "seal", "100 mixed replays leave every allocation counter as it was", "replays, and the heap"),
    Gate("O4", "seal", "on exact probes the attention output is, bit for bit, what the ids alone give", "coordinates"),
    Gate("L1", "seal", "every rank's end was noticed and was a result", "ranks"),
    Gate("L2", "seal", "every rank's calls had the run's deadline", "ranks"),
    Gate("L3", "seal", "no process, socket, memory file or private file of the run is left", "ranks"),
    Gate("L4", "seal", "ranks were distinct processes with one source, plan and checkpoint", "ranks"),
    Gate("V4", "seal", "a self-test of this very source passed", "self-tests"),
    Gate("V5", "seal", "the qualifier's source holds no tolerance and no float literal in a comparison", "source files"),
    Gate("S4", "case", "addresses and offsets of every view are those of the seal", "views, at both ends of every replay"),
    Gate("S5", "case", "persistent caches change in the appended records only, and those equal an independent encode", "pages"),
    Gate("S6", "case", "reusable bytes outside the declared write set, red zones and slack are untouched", "checkpoints"),
    Gate(
        "S7",
        "case",
        "for buffers that share bytes, the last access of the early one happens before the first of the late one",
        "orderings",
    ),
    Gate("A3", "case", "no allocation, no free and no new mapping between seal and end", "replays"),
    Gate("X1", "case", "persistent caches are equal in both arrangements", "pages"),
    Gate("X2", "case", "index queries and attention queries are equal in both arrangements", "rows"),
    Gate("X3", "case", "head weights are equal in both arrangements", "rows"),
    Gate("X4", "case", "histories and visible counts equal an independent gather from the persistent caches", "tokens and rows"),
    Gate("X5", "case", "all ranks hold the same ids and counts, and the shards cover every page once", "digests and pages"),
    Gate("X6", "case", "the caller's rows, the weights and the tables are unmodified", "digests"),
    Gate("K1", "case", "each row has min(k, visible) unique visible ids in emitted order, then padding", "rows"),
    Gate("K2", "case", "the ranked scores are equal in both arrangements and each set is valid for them", "rows"),
    Gate("K3", "case", "ranked scores and sets of audited rows agree with exact scores of the persistent bytes", "scores"),
    Gate("K4", "case", "ids that differ between the arrangements are proved ties", "rows"),
    Gate("K5", "case", "on lattice data every ranked score equals the exact one", "rows"),
    Gate("K6", "case", "the ties the case was built for are there", "conditions"),
    Gate("K7", "case", "each set of a foreign selector is valid for exact scores of the persistent bytes", "rows"),
    Gate("B1", "case", "a foreign kernel writes the engine's bytes on the same operands", "steps"),
    Gate("O0", "case", "the recorded tail gives the same bytes twice", "rows"),
    Gate("O1", "case", "the output is the recorded tail on the emitted order over private storage", "rows"),
    Gate("O1s", "case", "the tail's bytes depend on the order of the ids", "steps"),
    Gate("O2", "case", "the attention output lies within the derived bound of the fp64 oracle", "coordinates"),
    Gate("O3", "case", "the attention output lies in the interval that its recorded order leaves", "coordinates"),
    Gate("O5", "case", "what single wrong records the oracles would betray is counted", "rows"),
    Gate("O6", "case", "outputs are finite, not all zero, and overwritten", "rows"),
    Gate("V1", "case", "every other cell checked what it had to check", "cells"),
    Gate("V2", "case", "poison was laid, was overwritten where declared, and is intact elsewhere", "replays"),
    Gate("V3", "case", "tie, padding, boundary and shard-crossing counters reach the case's minima", "counters"),
)

#: every gate this version evaluates
GATES: dict[str, Gate] = {gate.id: gate for gate in _TABLE}

#: gates of the specification that this version does not evaluate; a record says so, and nothing stands in for them
ABSENT: tuple[str, ...] = ()
#: what a record lists as absent when no self-test of its source was found
UNLICENSED = ("V4",)


def worse(first: str, second: str) -> str:
    """The worse of two verdicts."""
    return max(first, second, key=VERDICTS.index)


def combine(verdicts: Iterable[str]) -> str:
    """The verdict of many cells; no cell at all is an ERROR, because nothing was proved."""
    found = list(verdicts)
    if not found:
        return "ERROR"
    verdict = "PASS"
    for one in found:
        verdict = worse(verdict, one)
    return verdict


@dataclass
class Cell:
    """The tally of one gate in one case on one rank.

    n_expected: units the case table demands
    n_checked:  units looked at
    n_bytes:    bytes compared or read for it
    worst:      the gate's most extreme number, an integer or a float (recorded as its hexadecimal form)
    """

    gate: str
    n_expected: int = 0
    n_checked: int = 0
    n_bytes: int = 0
    verdict: str = "PASS"
    worst: int | float | None = None
    first_failure: str | None = None
    notes: dict[str, int] = field(default_factory=dict)

    def passed(self, units: int, nbytes: int = 0) -> None:
        """``units`` more units were checked and found good."""
        self.n_checked += units
        self.n_bytes += nbytes

    def fail(self, units: int, message: str, verdict: str = "FAIL") -> None:
        """``units`` more units were checked; at least one is bad for the reason in ``message`` (the first is kept)."""
        self.n_checked += units
        self.verdict = worse(self.verdict, verdict)
        if self.first_failure is None:
            self.first_failure = message

    def check(self, good: bool, units: int, message: str, nbytes: int = 0) -> None:
        """Count ``units`` and record ``message`` as a failure unless ``good``."""
        self.n_bytes += nbytes
        if good:
            self.n_checked += units
        else:
            self.fail(units, message)

    def extreme(self, value: int | float) -> None:
        """Keep the larger of ``value`` and what was there."""
        if self.worst is None or value > self.worst:
            self.worst = value

    def close(self) -> None:
        """A count that differs from the expectation is an ERROR: something was not looked at, or was looked at twice."""
        if self.n_checked != self.n_expected:
            self.fail(0, f"checked {self.n_checked} of {self.n_expected} {GATES[self.gate].unit}", "ERROR")

    def flag(self, case: str, rank: int) -> dict[str, object]:
        """The line of flags.jsonl."""
        worst = self.worst.hex() if isinstance(self.worst, float) else self.worst
        return {
            "case": case, "rank": rank, "gate": self.gate, "verdict": self.verdict, "n_expected": self.n_expected,
            "n_checked": self.n_checked, "n_bytes": self.n_bytes, "worst": worst, "first_failure": self.first_failure,
        }  # fmt: skip


class Sheet:
    """The cells of one case on one rank. A gate with nothing to check there has no cell."""

    def __init__(self, case: str, rank: int):
        self.case, self.rank = case, rank
        self.cells: dict[str, Cell] = {}

    def expect(self, gate: str, units: int) -> None:
        """Raise the expectation of ``gate`` by ``units``; zero makes no cell."""
        assert gate in GATES, gate
        if units:
            self.cell(gate).n_expected += units

    def cell(self, gate: str) -> Cell:
        """The gate's cell, made on first use."""
        return self.cells.setdefault(gate, Cell(gate))

    def close(self) -> list[dict[str, object]]:
        """Close every cell, add V1 for a case, and return the flag lines in the order of the registry."""
        for cell in self.cells.values():
            cell.close()
        if self.case != SEAL:
            self._count_cells()
        return [self.cells[g].flag(self.case, self.rank) for g in GATES if g in self.cells]

    def _count_cells(self) -> None:
        summary = Cell("V1", n_expected=len(self.cells))
        for cell in self.cells.values():
            complete = cell.n_checked == cell.n_expected and cell.n_expected > 0
            summary.check(complete, 1, f"{cell.gate} checked {cell.n_checked} of {cell.n_expected} {GATES[cell.gate].unit}")
        self.cells["V1"] = summary
