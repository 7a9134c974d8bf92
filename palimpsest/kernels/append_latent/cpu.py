"""append_latent, portable engine."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from palimpsest.core.errors import UnknownName
from palimpsest.core.geometry import LATENT_FORMATS
from palimpsest.kernels import linear
from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.fp8 import Quantiser, clamp
from palimpsest.kernels.linear import Gemm, make_projection, row_tiles
from palimpsest.kernels.norms import RowNorm
from palimpsest.kernels.rope import Rotation
from palimpsest.kernels.sizes import ROW_TILE
from palimpsest.ranks.layout import token_ranges

#: elements that share a scale in an fp8_ds_mla record
BLOCK = 128

#: (tile [ROW_TILE, kv_lora+rope_dims] fp32, records [count, record] u8) -> writes the records
Writer = Callable[[torch.Tensor, torch.Tensor], None]


def gemms(params: Mapping[str, Any]) -> list[Gemm]:
    return linear.gemms(params["hidden"], params["kv_lora"] + params["rope_dims"])


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. Only this rank's tokens are projected."""
    scratch, p = call.scratch, call.params
    scratch.reset()
    latent, width, page = p["kv_lora"], p["kv_lora"] + p["rope_dims"], p["page"]
    hidden, weight, cache = call.view("hidden"), call.view("kv_a"), call.view("latent_cache")
    table = call.view("rope") if call.has("rope") else None
    projection = make_projection(call, weight, p["hidden"], width)
    norm = RowNorm(scratch, call.view("kv_a_norm"), p["eps"])
    rotate = Rotation(scratch, p["rope_dims"], p["rope_layout"])
    write = _writer(scratch, p)
    tile = scratch.take((ROW_TILE, width), "fp32")
    for start, stop, place in token_ranges(call.comm.rank, p["ranks"], chunk.history, chunk.visible, page=page):
        records = cache[place // page].view(page, -1)
        at = place % page - (start - chunk.history)
        for first, end in row_tiles(start - chunk.history, stop - chunk.history):
            projection.project(hidden[first:end], weight, tile)
            norm(tile[:, :latent])
            rotate(tile[: end - first, latent:], None if table is None else table[first:end])
            write(tile, records[at + first : at + end])


def _writer(scratch: Scratch, p: Mapping[str, Any]) -> Writer:
    """How one tile becomes records of ``format``."""
    latent, kind = p["kv_lora"], p["format"]
    if kind == "fp8_ds_mla":
        blocks = latent // BLOCK
        quantise = Quantiser(scratch, latent, BLOCK, power_of_two=False)
        dense = scratch.take((ROW_TILE, latent), "fp32")

        def write_ds_mla(tile: torch.Tensor, records: torch.Tensor) -> None:
            count, scales = records.shape[0], latent + 4 * blocks
            dense.copy_(tile[:, :latent])
            quantise(dense)
            records[:, :latent].view(torch.float8_e4m3fn).copy_(quantise.codes[:count])
            records[:, latent:scales].view(torch.float32).copy_(quantise.scales[:count])
            records[:, scales:].view(torch.bfloat16).copy_(tile[:count, latent:])

        return write_ds_mla
    if kind not in LATENT_FORMATS:
        raise UnknownName("latent format", kind, LATENT_FORMATS)
    dtype = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    scale = p["latent_scale"]

    def write(tile: torch.Tensor, records: torch.Tensor) -> None:
        if kind == "fp8":
            np.divide(tile.numpy(), np.float32(scale), out=tile.numpy())
            clamp(tile)
        records.view(dtype).copy_(tile[: records.shape[0]])

    return write
