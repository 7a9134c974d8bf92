"""append_index, portable engine."""

from collections.abc import Mapping
from typing import Any

import torch

from palimpsest.kernels import linear
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.fp8 import Quantiser
from palimpsest.kernels.hadamard import Hadamard
from palimpsest.kernels.linear import Gemm, make_projection, row_tiles
from palimpsest.kernels.norms import RowNorm
from palimpsest.kernels.rope import Rotation
from palimpsest.kernels.sizes import ROW_TILE
from palimpsest.ranks.layout import token_ranges


def gemms(params: Mapping[str, Any]) -> list[Gemm]:
    return linear.gemms(params["hidden"], params["dim"])


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. Only this rank's tokens are projected."""
    scratch, p = call.scratch, call.params
    scratch.reset()
    owned = list(token_ranges(call.comm.rank, p["ranks"], chunk.history, chunk.visible, page=p["page"]))
    if not owned:
        return
    hidden, dim = call.view("hidden"), p["dim"]
    table = call.view("rope") if call.has("rope") else None
    projection = make_projection(call, call.view("index_k"), p["hidden"], dim, resident=True)
    projection.load(call.view("index_k"))
    norm = RowNorm(scratch, call.view("index_k_norm"), p["eps"], call.view("index_k_norm_bias"))
    rotate = Rotation(scratch, p["rope_dims"], p["rope_layout"])
    hadamard = Hadamard(scratch, dim) if p["hadamard"] else None
    quantise = Quantiser(scratch, dim, dim, power_of_two=p["scale_format"] == "ue8m0") if p["format"] == "fp8" else None
    tile = scratch.take((ROW_TILE, dim), "fp32")
    for start, stop, place in owned:
        for first, end in row_tiles(start - chunk.history, stop - chunk.history):
            projection.apply(hidden[first:end], tile)
            norm(tile)
            rotate(tile[: end - first, : p["rope_dims"]], None if table is None else table[first:end])
            if hadamard:
                hadamard(tile)
            _store(call, tile, quantise, place + first - (start - chunk.history), end - first)


def _store(call: Call, tile: torch.Tensor, quantise: Quantiser | None, place: int, count: int) -> None:
    """Write ``count`` records from local token ``place`` on; they lie in one page."""
    page, dim = call.params["page"], call.params["dim"]
    at, row = place % page, call.view("index_cache")[place // page]
    if quantise is None:
        row.view(torch.float32).view(page, dim)[at : at + count].copy_(tile[:count])
        return
    quantise(tile)
    row[: page * dim].view(torch.float8_e4m3fn).view(page, dim)[at : at + count].copy_(quantise.codes[:count])
    row[page * dim :].view(torch.float32)[at : at + count].copy_(quantise.scales[:count, 0])
