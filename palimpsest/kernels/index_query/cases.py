"""Hostile cases of index_query: slices of 1, 2 and 4 ranks with few active rows, both formats and scales, rotations, zero
rows.
"""

from collections.abc import Iterator
from typing import Any

import torch

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, one, poison


def cases() -> Iterator[Case]:
    for ranks, capacity, rows, kind, scale, hadamard, layout in (
        (1, 40, 0, "fp8", "ue8m0", True, "half"),
        (1, 40, 33, "fp8", "ue8m0", True, "half"),
        (2, 16, 9, "fp8", "fp32", False, "interleaved"),
        (4, 16, 1, "fp8", "ue8m0", False, "none"),
        (4, 15, 15, "fp32", "ue8m0", False, "half"),
        (4, 16, 6, "fp8", "fp32", True, "none"),
    ):
        params = {
            "hidden": 24, "q_lora": 12, "heads": 3, "dim": 8, "rope_dims": 4, "rope_layout": layout, "hadamard": hadamard,
            "scale_format": scale, "format": kind, "ranks": ranks,
        }  # fmt: skip
        planes = tuple(_planes(params, capacity, rows) for _ in range(ranks))
        yield Case(f"{rows} of {capacity} rows on {ranks} ranks, {kind}, {scale}, {layout}", params, Chunk(5, rows), planes)


def _planes(p: dict[str, Any], capacity: int, rows: int) -> Planes:
    """The same on every rank, as hidden rows and weights are."""
    draw, size = Draw(capacity * 100 + rows), -(-capacity // p["ranks"])
    hidden, latent = draw.integers((capacity, p["hidden"]), "bf16"), draw.integers((capacity, p["q_lora"]), "bf16")
    latent[::4] = 0
    hidden[rows:], latent[rows:] = torch.nan, torch.nan
    planes = one(
        hidden=hidden,
        q_latent=latent,
        index_q=draw.integers((p["heads"] * p["dim"], p["q_lora"])),
        index_w=draw.integers((p["heads"], p["hidden"])),
        index_query=poison((size, p["heads"], p["dim"]), "e4m3" if p["format"] == "fp8" else "fp32"),
        head_weights=poison((size, p["heads"]), "fp32"),
    )
    return planes if p["rope_layout"] == "none" else planes | one(rope=draw.table(capacity, p["rope_dims"] // 2))
