"""Hostile cases of append_index: chunks that start and end inside pages, pages longer than a row tile, ranks that own nothing."""

from collections.abc import Iterator
from typing import Any

import torch

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, one, poison


def cases() -> Iterator[Case]:
    for ranks, page, history, rows, kind, scale, hadamard, layout in (
        (1, 4, 0, 0, "fp8", "ue8m0", True, "half"),
        (1, 4, 0, 16, "fp8", "ue8m0", True, "half"),
        (2, 4, 16, 13, "fp8", "fp32", False, "none"),
        (4, 4, 48, 16, "fp8", "ue8m0", True, "interleaved"),
        (4, 4, 7, 1, "fp8", "ue8m0", False, "half"),
        (2, 64, 60, 70, "fp8", "ue8m0", True, "half"),
        (2, 4, 3, 16, "fp32", "fp32", True, "half"),
    ):
        params = {
            "hidden": 24, "dim": 8, "eps": 1e-6, "rope_dims": 4, "rope_layout": layout, "hadamard": hadamard,
            "scale_format": scale, "format": kind, "page": page, "ranks": ranks,
        }  # fmt: skip
        planes = tuple(_planes(params, history, rows) for _ in range(ranks))
        yield Case(f"{rows} rows at {history}, page {page}, {ranks} ranks, {kind}, {scale}", params, Chunk(history, rows), planes)


def _planes(p: dict[str, Any], history: int, rows: int) -> Planes:
    draw, dim, capacity = Draw(history * 100 + rows), p["dim"], rows + 3
    hidden = draw.integers((capacity, p["hidden"]), "bf16")
    hidden[::5] = 0
    hidden[rows:] = torch.nan
    record = dim + 4 if p["format"] == "fp8" else 4 * dim
    pages = -(-(history + rows + 1) // p["page"])
    planes = one(
        hidden=hidden,
        index_k=draw.integers((dim, p["hidden"])),
        index_k_norm=draw.integers((dim,)),
        index_k_norm_bias=draw.integers((dim,)),
        index_cache=poison((-(-pages // p["ranks"]), p["page"] * record), "u8"),
    )
    return planes if p["rope_layout"] == "none" else planes | one(rope=draw.table(capacity, p["rope_dims"] // 2))
