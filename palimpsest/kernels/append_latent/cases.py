"""Hostile cases of append_latent: every record format, chunks that start and end inside pages, saturating values, no rotary
dims.
"""

from collections.abc import Iterator
from typing import Any

import torch

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, one, poison


def cases() -> Iterator[Case]:
    for ranks, page, history, rows, kind, latent, rope, layout, scale in (
        (1, 4, 0, 0, "fp8", 16, 4, "half", 1.0),
        (1, 4, 0, 16, "fp8", 16, 4, "interleaved", 1.0),
        (2, 4, 16, 13, "fp8", 16, 4, "none", 0.003),
        (4, 4, 48, 16, "bf16", 16, 4, "interleaved", 1.0),
        (4, 4, 7, 1, "fp32", 16, 4, "half", 1.0),
        (2, 64, 60, 70, "fp8_ds_mla", 256, 4, "interleaved", 1.0),
        (2, 4, 3, 16, "fp8_ds_mla", 128, 0, "none", 1.0),
    ):
        params = {
            "hidden": 24, "kv_lora": latent, "rope_dims": rope, "eps": 1e-6, "rope_layout": layout, "format": kind,
            "latent_scale": scale, "page": page, "ranks": ranks,
        }  # fmt: skip
        planes = tuple(_planes(params, history, rows) for _ in range(ranks))
        yield Case(f"{rows} rows at {history}, page {page}, {ranks} ranks, {kind}", params, Chunk(history, rows), planes)


def _planes(p: dict[str, Any], history: int, rows: int) -> Planes:
    draw, latent, rope, capacity = Draw(history * 100 + rows), p["kv_lora"], p["rope_dims"], rows + 3
    hidden = draw.integers((capacity, p["hidden"]), "bf16")
    hidden[::5] = 0
    hidden[rows:] = torch.nan
    elements = latent + rope
    record = {"fp8": elements, "bf16": 2 * elements, "fp32": 4 * elements, "fp8_ds_mla": latent + latent // 32 + 2 * rope}[
        p["format"]
    ]
    pages = -(-(history + rows + 1) // p["page"])
    planes = one(
        hidden=hidden,
        kv_a=draw.integers((elements, p["hidden"])),
        kv_a_norm=draw.integers((latent,)),
        latent_cache=poison((-(-pages // p["ranks"]), p["page"] * record), "u8"),
    )
    return planes if p["rope_layout"] == "none" else planes | one(rope=draw.table(capacity, rope // 2))
