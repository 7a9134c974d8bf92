"""How many units each gate must check in a case on a rank, from the case table's closed forms.

The gates count what they look at; ``verify`` has a table of its own. All three numbers must be equal.
"""

from dataclasses import asdict, dataclass

from palimpsest.prove.cases import Case, Profile, Replay, audited_rows, expected_checks
from palimpsest.prove.gates import Sheet

#: base and alias
ARRANGEMENTS = ("base", "alias")
#: digests X6 compares before and after: caller's rows, weights, tables
INPUTS = 3
#: checkpoints of S6: before the latent gather, and at the end
CHECKPOINTS = 2
#: conditions of K6: tie rows, sides, shards, zero rows
TIE_CONDITIONS = ("tie_rows", "sides", "shards", "zero_rows")


@dataclass(frozen=True)
class Prepared:
    """What does not depend on the case: views of both arrangements together, features of the local heads, the audit seed."""

    profile: Profile
    topk: int
    views: int
    features: int
    seed: int


def lattice_rows(p: Profile, step: Replay, rank: int, is_lattice: "set[int]") -> int:
    """Lattice rows of this rank's slice."""
    first = rank * p.slice_rows
    return sum(row in is_lattice for row in range(first, min(first + p.slice_rows, step.rows)))


def expect_case(sheet: Sheet, prepared: Prepared, case: Case, rank: int, lattice: list[set[int]]) -> None:
    """Set the expectation of every gate of a case. ``lattice``: per replay, the chunk rows of the lattice regime."""
    p, both, n = prepared.profile, len(ARRANGEMENTS), len(case.steps)
    pages = n * 2 * p.limits.rank_pages
    sheet.expect("S4", n * 2 * prepared.views)
    sheet.expect("S5", both * pages)
    sheet.expect("S6", both * n * CHECKPOINTS)
    sheet.expect("A3", both * n)
    sheet.expect("X1", pages)
    sheet.expect("X5", both * n * 2 * p.ranks + p.tokens // p.page)
    sheet.expect("X6", both * n * INPUTS)
    sheet.expect("V2", both * n)
    sheet.expect("V3", sum(value > 0 for value in asdict(case.minima).values()))
    sheet.expect("K6", len(TIE_CONDITIONS) if case.minima.tie_rows else 0)
    for step, rows in zip(case.steps, lattice, strict=True):
        _expect_replay(sheet, prepared, step, rank, rows)
    if case.equals:
        sheet.expect("O1", both)


def _expect_replay(sheet: Sheet, prepared: Prepared, step: Replay, rank: int, lattice: set[int]) -> None:
    p, both = prepared.profile, len(ARRANGEMENTS)
    audited = audited_rows(p, step, prepared.seed)
    closed = expected_checks(p, prepared.topk, step, rank)
    own, active, prepared_rows = closed["slice_rows"], closed["rows"], closed["rows"] + closed["pad_rows"]
    sheet.expect("X2", own + active)
    sheet.expect("X3", own)
    sheet.expect("X4", both * (2 * closed["history"] + prepared_rows))
    sheet.expect("K1", both * (prepared_rows + own))
    sheet.expect("K2", (both + 1) * own)
    sheet.expect("K3", both * sum(step.history + row + 1 for row, owner in audited if owner == rank))
    sheet.expect("K4", own)
    sheet.expect("K5", both * lattice_rows(p, step, rank, lattice))
    sheet.expect("O0", both * len(audited))
    sheet.expect("O1", both * prepared_rows)
    sheet.expect("O1s", both * (active > 0))
    sheet.expect("O2", both * len(audited) * prepared.features)
    sheet.expect("O6", both * active)
