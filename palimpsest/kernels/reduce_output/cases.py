"""Hostile cases of reduce_output: sums whose value depends on the tree, staging of one row per rank, ranks without rows."""

from collections.abc import Iterator

import torch

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, one, poison

HIDDEN = 12


def cases() -> Iterator[Case]:
    for ranks, capacity in ((1, 7), (2, 7), (4, 9), (8, 9)):
        for rows in sorted({0, 1, capacity // 2, capacity}):
            for room, dtype in ((1, "bf16"), (2, "fp32"), (50, "bf16")):
                planes = tuple(_planes(capacity, ranks, rank, rows, room, dtype) for rank in range(ranks))
                params = {"hidden": HIDDEN, "ranks": ranks}
                yield Case(f"{rows} of {capacity} rows, {ranks} ranks, staging {room}, {dtype}", params, Chunk(1, rows), planes)


def _planes(capacity: int, ranks: int, rank: int, rows: int, room: int, dtype: str) -> Planes:
    draw = Draw(rank)
    partial = draw.normal((capacity, HIDDEN)) * torch.exp2(draw.integers((capacity, HIDDEN), "fp32", -12, 12))
    partial[rows:] = torch.nan
    staging = poison((ranks * room * HIDDEN * 4 + 8,), "u8")
    return one(partial=partial, staging=staging, output=poison((capacity, HIDDEN), dtype))
