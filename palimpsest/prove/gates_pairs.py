"""Gates that compare two things of the same replay: base with alias (X1-X3, half of K2), rank with rank (X5), replay with replay
(C11).

Of the base arrangement only digests and this rank's selected ids are kept, so memory does not grow with the context.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from palimpsest.prove.capture import Observation, digests, whole_digest
from palimpsest.prove.gates import Sheet
from palimpsest.prove.peers import Card

#: what must be equal in both arrangements, row by row
ROWS = ("index_query", "head_weights", "query", "context", "partial")


@dataclass
class Kept:
    """One replay, reduced: row digests, page digests, score digests, the local ids, digests of what all ranks must agree on."""

    pages: dict[str, NDArray[np.uint64]]
    rows: dict[str, NDArray[np.uint64]]
    scores: dict[int, bytes]
    local_ids: NDArray[np.int32]
    ids: str
    counts: str
    output: str
    row_ids: NDArray[np.uint64]
    row_outputs: NDArray[np.uint64]
    planned: dict[str, int] = field(default_factory=dict)


def keep(o: Observation, topk: int) -> Kept:
    """Reduce an observation."""
    return Kept(
        pages=dict(o.pages_after),
        rows={name: digests(o.copies[name]) for name in ROWS},
        scores={row: found.digest for row, found in o.scores.items()},
        local_ids=o.array("local_ids", np.int32, -1, topk).copy(),
        ids=whole_digest(o.copies["ids"]).hex(),
        counts=whole_digest(o.copies["counts"]).hex(),
        output=whole_digest(np.ascontiguousarray(o.copies["output"][: len(o.copies["output"]) // o.prepared * o.rows])).hex(),
        row_ids=digests(o.copies["ids"].reshape(o.prepared, -1)[: o.rows]),
        row_outputs=digests(o.copies["output"].reshape(o.prepared, -1)[: o.rows]),
    )


def same_where_same_ids(first: Kept, second: Kept) -> bool:
    """A selector that breaks ties as it likes: attention and output are equal in every row whose ids are; the other rows are
    proved one by one.
    """
    same = first.row_ids == second.row_ids
    pairs = [(first.row_outputs, second.row_outputs), *((first.rows[name], second.rows[name]) for name in ("context", "partial"))]
    return all(np.array_equal(one[same], two[same]) for one, two in pairs)


def arrangements(sheet: Sheet, base: Kept, alias: Kept, o: Observation, where: str, *, own_order: bool = False) -> None:
    """X1, X2, X3 and the bitwise half of K2. ``own_order``: the selector breaks ties as it likes and shows no scores."""
    for cache, pages in base.pages.items():
        bad = np.flatnonzero(pages != alias.pages[cache])
        text = f"{where}: page {int(bad[0]) if len(bad) else 0} of {cache} differs between base and alias"
        sheet.cell("X1").check(not len(bad), len(pages), text)
    for gate, name, units in (("X2", "index_query", o.own), ("X2", "query", o.rows), ("X3", "head_weights", o.own)):
        if units:
            bad = np.flatnonzero(base.rows[name] != alias.rows[name])
            text = f"{where}: row {int(bad[0]) if len(bad) else 0} of {name} differs between base and alias"
            sheet.cell(gate).check(not len(bad), units, text, o.copies[name].nbytes)
    if own_order:
        sheet.cell("O1").check(
            same_where_same_ids(base, alias), 0, f"{where}: outputs of rows with the same ids differ between base and alias"
        )
        return
    for row in range(o.first_row, o.first_row + o.own):
        same = row in base.scores and base.scores[row] == alias.scores.get(row)
        sheet.cell("K2").check(same, 1, f"{where} row {row}: the ranked scores differ between base and alias")
    if base.output != alias.output:
        sheet.cell("O1").fail(0, f"{where}: the outputs differ between base and alias")


def agreement(sheet: Sheet, everyone: list[dict[str, str]], where: str) -> None:
    """X5 of one replay: every rank's ids and counts have the digest of rank 0's; so has every rank's output (under O1)."""
    for name in ("ids", "counts"):
        for rank, found in enumerate(everyone):
            good = found[name] == everyone[0][name]
            sheet.cell("X5").check(good, 1, f"{where}: rank {rank} holds other {name} than rank 0")
    other = [rank for rank, found in enumerate(everyone) if found["output"] != everyone[0]["output"]]
    if other:
        sheet.cell("O1").fail(0, f"{where}: rank {other[0]} holds another output than rank 0")


def shard_map(sheet: Sheet, cards: list[Card], *, pages: int, record: dict[str, int], page: int) -> None:
    """X5 once per case: page p lies on rank p mod W at p div W, inside that rank's cache, and no place is used twice."""
    used: set[tuple[int, int]] = set()
    bad: list[str] = []
    for number in range(pages):
        rank, local = number % len(cards), number // len(cards)
        fits = all((local + 1) * page * size <= cards[rank].places[cache][2] for cache, size in record.items())
        if not fits or (rank, local) in used:
            bad.append(f"page {number} has no place of its own on rank {rank}")
        used.add((rank, local))
    sheet.cell("X5").check(not bad, pages, bad[0] if bad else "")


def repeats(sheet: Sheet, first: Kept, again: Kept, where: str, *, own_order: bool = False) -> None:
    """C11 equals C09 byte for byte: selection, scores, attention, output; with ``own_order`` the last two, in rows with the same
    ids.
    """
    if own_order:
        sheet.cell("O1").check(
            same_where_same_ids(first, again), 1, f"{where}: rows with the same ids differ from those of the first replay"
        )
        return
    same = (
        (first.ids, first.counts, first.output, first.scores) == (again.ids, again.counts, again.output, again.scores)
        and np.array_equal(first.local_ids, again.local_ids)
        and all(np.array_equal(first.rows[name], again.rows[name]) for name in ROWS)
    )
    sheet.cell("O1").check(same, 1, f"{where}: the repeated replay differs from the first one")
