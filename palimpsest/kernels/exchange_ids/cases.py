"""Hostile cases of exchange_ids: every active row count from none to all, capacities that the ranks do not divide."""

from collections.abc import Iterator

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, one, poison

TOPK = 5


def cases() -> Iterator[Case]:
    for ranks, capacity in ((1, 6), (2, 7), (4, 6), (4, 16)):
        for rows in sorted({0, 1, capacity // 2, capacity - 1, capacity}):
            planes = tuple(_planes(capacity, -(-capacity // ranks), rank) for rank in range(ranks))
            yield Case(f"{rows} of {capacity} rows, {ranks} ranks", {"topk": TOPK, "ranks": ranks}, Chunk(9, rows), planes)


def _planes(capacity: int, size: int, rank: int) -> Planes:
    draw = Draw(rank)
    planes = one(
        local_ids=draw.integers((size, TOPK), "i32", -1, 1000),
        ids=poison((capacity, TOPK), "i32"),
        counts=poison((capacity,), "i32"),
    )
    local = {"counts": draw.integers((size,), "i32", 0, TOPK), "nans": draw.integers((size,), "i32", 0, 9)}
    return planes | {"local_counts": local}
