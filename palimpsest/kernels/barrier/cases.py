"""Hostile cases of barrier: a fresh counter, one past 32 bits."""

from collections.abc import Iterator

import torch

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, one


def cases() -> Iterator[Case]:
    for ranks in (1, 2, 4):
        for generation in (0, (1 << 32) - 1):
            planes = tuple(one(signals=torch.full((ranks,), generation, dtype=torch.int64)) for _ in range(ranks))
            yield Case(f"{ranks} ranks at {generation}", {"ranks": ranks}, Chunk(0, 0), planes)
