"""Is a selected set right, and is a difference between two of them a tie: definitions, classes, certificates.

A set A is valid for scores s when it has m = min(K, n) distinct visible ids and min s(A) >= max s(rest). Two valid sets differ
only inside the cutoff class, so each is proved on its own; comparing them with each other proves nothing about either. -0 equals
+0; a NaN or an infinity among visible scores is a fault.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palimpsest.prove.bounds import Arithmetic, exact_dots, score_error
from palimpsest.prove.certificate import SCHEMA, ReadRecord
from palimpsest.prove.exact import Cutoff, Exact, IndexRow, decode_keys, exact_score, filtered_scores

#: what fills an emitted slot past the count
PAD = -1


def structure_faults(
    ids: NDArray[np.int32], counts: NDArray[np.int32], *, history: int, rows: int, topk: int, first_row: int = 0
) -> list[tuple[int, str]]:
    """Gate K1 over emitted rows: pairs (row, what is wrong), at most one per row, empty when all hold.

    ids [n, topk] and counts [n] of rows first_row.. of the chunk; rows: active rows of the chunk. Row r sees history + r + 1
    tokens; it must hold min(K, visible) ids, ascending and distinct, in [0, visible), then pads; rows at or past ``rows`` hold
    pads only and count 0.
    """
    n = len(ids)
    number = first_row + np.arange(n)
    visible = np.where(number < rows, history + number + 1, 0)
    wanted = np.minimum(topk, visible)
    slots = np.arange(topk)
    taken = slots < wanted[:, None]
    inside = (ids >= 0) & (ids < visible[:, None])
    rising = np.ones(ids.shape, bool)
    rising[:, 1:] = (ids[:, 1:] > ids[:, :-1]) | ~taken[:, 1:]
    checks = (
        ("count {got}, {want} expected", counts != wanted),
        ("an id outside the visible tokens, or a pad too early", (taken & ~inside).any(axis=1)),
        ("ids not ascending and distinct", ~rising.all(axis=1)),
        ("a slot past the count is not a pad", (~taken & (ids != PAD)).any(axis=1)),
    )
    faults: dict[int, str] = {}
    for text, bad in checks:
        for at in np.flatnonzero(bad):
            faults.setdefault(int(number[at]), text.format(got=int(counts[at]), want=int(wanted[at])))
    return sorted(faults.items())


def validity_faults(selected: NDArray[np.integer], scores: NDArray[np.floating], topk: int) -> list[str]:
    """What keeps ``selected`` from being a valid top-k of ``scores`` [n] (the visible ones); empty when valid.

    Compares the numbers as they are: a score one ulp below the cutoff is a fault.
    """
    n = len(scores)
    m = min(topk, n)
    picked = np.asarray(selected, np.int64)
    faults = []
    bad = int(np.count_nonzero(~np.isfinite(scores)))
    if bad:
        faults.append(f"{bad} of {n} visible scores are not finite")
    if len(picked) != m:
        faults.append(f"{len(picked)} ids, {m} expected")
    if len(np.unique(picked)) != len(picked):
        faults.append(f"{len(picked) - len(np.unique(picked))} duplicate ids")
    if len(picked) and not (picked.min() >= 0 and picked.max() < n):
        faults.append(f"ids {int(picked.min())}..{int(picked.max())} outside 0..{n - 1}")
    if faults or m == n:
        return faults
    rest = np.ones(n, bool)
    rest[picked] = False
    low, high = scores[picked].min(), np.where(rest, scores, -np.inf).max()
    if not low >= high:
        faults.append(f"lowest selected score {float(low).hex()} is below the highest unselected {float(high).hex()}")
    return faults


def exact_faults(selected: NDArray[np.integer], cutoff: Cutoff, visible: int) -> list[str]:
    """What keeps ``selected`` from being valid for the exact scores behind ``cutoff``: G inside A inside G + E, |A| = m."""
    picked = np.asarray(selected, np.int64)
    faults = []
    if len(picked) != cutoff.m or len(np.unique(picked)) != len(picked):
        faults.append(f"{len(np.unique(picked))} distinct of {len(picked)} ids, {cutoff.m} expected")
    missing = np.setdiff1d(cutoff.above, picked)
    if len(missing):
        faults.append(f"{len(missing)} ids above the cutoff are missing, first {int(missing[0])}")
    wrong = np.setdiff1d(np.setdiff1d(picked, cutoff.above), cutoff.equal)
    if len(wrong):
        faults.append(f"{len(wrong)} ids below the cutoff are selected, first {int(wrong[0])} of {visible} visible")
    return faults


@dataclass(frozen=True)
class Difference:
    """Ids in which two selected sets of one row differ, ascending."""

    only_base: tuple[int, ...]
    only_alias: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.only_base or self.only_alias)


def difference(base: NDArray[np.integer], alias: NDArray[np.integer]) -> Difference:
    """base minus alias and alias minus base; pads are dropped."""
    first, second = (set(np.asarray(a, np.int64).tolist()) - {PAD} for a in (base, alias))
    return Difference(tuple(sorted(first - second)), tuple(sorted(second - first)))


def classify(score: Exact, tau: Exact, *, bits: int | None, kth_bits: int | None, within: bool) -> str:
    """``exact_tie`` (equal as rationals), ``rounded_tie`` (the deployed scores have the bits of the k-th and are ``within`` the
    derived error of s*), or ``other``. ``bits`` are those of the deployed fp32 scores, None where they were not captured."""
    if score == tau:
        return "exact_tie"
    if bits is not None and bits == kth_bits and within:
        return "rounded_tie"
    return "other"


@dataclass(frozen=True)
class TieRow:
    """One row as a certificate needs it.

    query: raw bytes [heads * dim] (fp8) or [heads * dim * 4]; weights: raw fp32 bytes [heads]
    """

    row: int
    rank: int
    topk: int
    visible: int
    format: str
    heads: int
    dim: int
    query: bytes
    weights: bytes

    @property
    def index_row(self) -> IndexRow:
        element = 1 if self.format == "fp8" else 4
        query = np.frombuffer(self.query, np.uint8).reshape(self.heads, self.dim * element)
        return IndexRow.from_bytes(query, np.frombuffer(self.weights, "<f4"), self.format)


def _entry(row: TieRow, index: IndexRow, model: Arithmetic, id: int, record: bytes, bits: int | None) -> tuple[dict, Exact, bool]:
    """(entry without its class, exact score, deployed score within its derived error)."""
    body = row.dim if row.format == "fp8" else 4 * row.dim
    key = decode_keys(np.frombuffer(record[:body], np.uint8)[None], row.format)
    scale = np.frombuffer(record[body:], "<f4") if row.format == "fp8" else None
    score = exact_score(index, key[0], 1 if scale is None else float(scale[0]))
    near = filtered_scores(index, key, scale, spread=not exact_dots(model, row.format))
    allowed = score_error(model, value=near.value, mass=near.mass, spread=near.spread, heads=row.heads, dim=row.dim)
    deployed = np.nan if bits is None else np.uint32(bits).view(np.float32).astype(np.float64)
    within = bool(abs(deployed - near.value[0]) <= allowed[0] + near.error[0])
    entry = {
        "id": id,
        "mantissa": score.mantissa,
        "exponent": score.exponent,
        "sha256": hashlib.sha256(record).hexdigest(),
        "bits": "" if bits is None else f"{bits:08x}",
    }
    return entry, score, within


def certificate(
    row: TieRow,
    found: Difference,
    cutoff: Cutoff,
    read_record: ReadRecord,
    *,
    model: Arithmetic,
    bits: dict[int, int] | None = None,
) -> dict:
    """The certificate of a row whose sets differ: JSON-able, integers and strings only, claims stated whether or not they hold.

    cutoff: the row's exact cutoff; bits: deployed fp32 score bits by id, for the differing ids and the k-th one (the lowest of
    the class), where captured. ``check_certificate`` is the judge.
    """
    if cutoff.tau is None or not len(cutoff.equal):
        raise ValueError(f"row {row.row} has no cutoff: nothing can tie")
    index, known = row.index_row, bits or {}
    kth_id = int(cutoff.equal[0])
    kth, tau, _ = _entry(row, index, model, kth_id, read_record(kth_id), known.get(kth_id))
    members = []
    for id in sorted(found.only_base + found.only_alias):
        entry, score, within = _entry(row, index, model, id, read_record(id), known.get(id))
        kind = classify(score, tau, bits=known.get(id), kth_bits=known.get(kth_id), within=within)
        members.append(entry | {"class": kind})
    return {
        "schema": SCHEMA,
        "row": row.row,
        "rank": row.rank,
        "topk": row.topk,
        "visible": row.visible,
        "format": row.format,
        "heads": row.heads,
        "dim": row.dim,
        "query": row.query.hex(),
        "weights": row.weights.hex(),
        "rounding": {"dot": _power(model.index_dot_u), "head": _power(model.head_u), "score": _power(model.score_u)},
        "kth": kth | {"class": "exact_tie"},
        "above": len(cutoff.above),
        "equal": len(cutoff.equal),
        "needed": cutoff.needed,
        "only_base": list(found.only_base),
        "only_alias": list(found.only_alias),
        "members": members,
    }


def _power(u: float) -> int:
    """The exponent of a unit roundoff."""
    exact = Exact.from_float(u)
    assert exact.mantissa == 1, f"unit roundoff {u} is not a power of two"
    return exact.exponent


@dataclass(frozen=True)
class Presence:
    """Where the members of one row's cutoff class lie: sides of the alias end, owning ranks; tied: a choice exists."""

    tied: bool
    members: int
    sides: int
    shards: int


def tie_presence(cutoff: Cutoff, *, alias_end: int, page: int, ranks: int) -> Presence:
    """Gate K6 of one row: is there a choice at the cutoff, and do the candidates straddle the alias end and the shards."""
    ids = cutoff.equal
    sides = int(np.any(ids < alias_end)) + int(np.any(ids >= alias_end))
    return Presence(cutoff.tied and len(ids) >= 2, len(ids), sides, len(np.unique(ids // page % ranks)))


def presence_total(rows: Sequence[Presence]) -> dict[str, int]:
    """Counters against a case's minima: tied rows, the most sides and the most shards any tied row reaches."""
    tied = [r for r in rows if r.tied]
    return {
        "tie_rows": len(tied),
        "sides": max((r.sides for r in tied), default=0),
        "shards": max((r.shards for r in tied), default=0),
    }
