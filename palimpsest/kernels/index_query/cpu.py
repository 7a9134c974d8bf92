"""index_query, portable engine."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from palimpsest.kernels import linear
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.fp8 import Quantiser
from palimpsest.kernels.hadamard import Hadamard
from palimpsest.kernels.linear import Gemm, make_projection, row_tiles
from palimpsest.kernels.rope import Rotation
from palimpsest.kernels.sizes import ROW_TILE
from palimpsest.ranks.layout import row_slice


def gemms(params: Mapping[str, Any]) -> list[Gemm]:
    return linear.gemms(params["q_lora"], params["dim"]) + linear.gemms(params["hidden"], params["heads"])


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. Head weights first, then one head after the other, which multiplies its column by the query's scale."""
    call.scratch.reset()
    size = call.view("index_query").shape[0]
    start, stop = row_slice(call.comm.rank, call.params["ranks"], size * call.params["ranks"], chunk.rows)
    if start < stop:
        head_weights(call, start, stop)
        _queries(call, start, stop)


def head_weights(call: Call, start: int, stop: int) -> None:
    """head_weights[i, h] = fp32(fp32(dot * heads**-0.5) * dim**-0.5)"""
    p = call.params
    projection = make_projection(call, call.view("index_w"), p["hidden"], p["heads"])
    tile = call.scratch.take((ROW_TILE, p["heads"]), "fp32")
    hidden, weight, out = call.view("hidden"), call.view("index_w"), call.view("head_weights")
    for first, end in row_tiles(start, stop):
        projection.project(hidden[first:end], weight, tile)
        for factor in (p["heads"] ** -0.5, p["dim"] ** -0.5):
            np.multiply(tile.numpy(), np.float32(factor), out=tile.numpy())
        out[first - start : end - start].copy_(tile[: end - first])


def _queries(call: Call, start: int, stop: int) -> None:
    scratch, p = call.scratch, call.params
    dim, stored = p["dim"], p["format"] == "fp8"
    weights = call.view("index_q").view(p["heads"], dim, p["q_lora"])
    source, out, scaled = call.view("q_latent"), call.view("index_query"), call.view("head_weights")
    table = call.view("rope") if call.has("rope") else None
    projection = make_projection(call, weights, p["q_lora"], dim, resident=True)
    rotate = Rotation(scratch, p["rope_dims"], p["rope_layout"])
    hadamard = Hadamard(scratch, dim) if p["hadamard"] else None
    quantise = Quantiser(scratch, dim, dim, power_of_two=p["scale_format"] == "ue8m0") if stored else None
    tile = scratch.take((ROW_TILE, dim), "fp32")
    for head in range(p["heads"]):
        projection.load(weights[head])
        for first, end in row_tiles(start, stop):
            m, at = end - first, first - start
            projection.apply(source[first:end], tile)
            rotate(tile[:m, : p["rope_dims"]], None if table is None else table[first:end])
            if hadamard:
                hadamard(tile)
            if quantise:
                quantise(tile)
                out[at : at + m, head].copy_(quantise.codes[:m])
                column = scaled[at : at + m, head]
                torch.mul(column, quantise.scales[:m, 0], out=column)
            else:
                out[at : at + m, head].copy_(tile[:m])
