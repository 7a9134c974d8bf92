"""index_query, ``amx`` engine: all heads of a row tile in one projection, and their records in one compiled pass.

fp8 records under bf16 weights whose depth is a multiple of 32; others are formed by the portable engine's file.
"""

import torch

from palimpsest.kernels.amx_linear import AmxProjection
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.index_query import cpu
from palimpsest.kernels.index_query.amx_kernel import HALF, INTERLEAVED, NONE, Record, form_records
from palimpsest.kernels.linear import row_tiles
from palimpsest.kernels.sizes import ROW_TILE
from palimpsest.ranks.layout import row_slice

LAYOUTS = {"none": NONE, "half": HALF, "interleaved": INTERLEAVED}


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    p, weight = call.params, call.view("index_q")
    if p["format"] != "fp8" or weight.dtype != torch.bfloat16 or p["q_lora"] % 32:
        cpu.run(call, chunk)
        return
    size = call.view("index_query").shape[0]
    start, stop = row_slice(call.comm.rank, p["ranks"], size * p["ranks"], chunk.rows)
    if start < stop:
        call.scratch.reset()
        cpu.head_weights(call, start, stop)
        call.scratch.reset()
        _queries(call, weight, start, stop)


def _queries(call: Call, weight: torch.Tensor, start: int, stop: int) -> None:
    scratch, p = call.scratch, call.params
    heads, dim = p["heads"], p["dim"]
    projection = AmxProjection(scratch, p["q_lora"], heads * dim)
    tile = scratch.take((ROW_TILE, heads * dim), "fp32")
    layout = LAYOUTS[p["rope_layout"] if call.has("rope") and p["rope_dims"] else "none"]
    record = Record(
        layout=layout,
        rope_dims=p["rope_dims"],
        hadamard=p["hadamard"],
        power_of_two=p["scale_format"] == "ue8m0",
        line=scratch.take((2 * dim,), "fp32").numpy(),
        wide=scratch.take((dim,), "fp64").numpy(),
    )
    source, table = call.view("q_latent"), call.view("rope") if layout else scratch.take((1, 1, 2), "fp32")
    codes, scaled = call.view("index_query").view(torch.uint8).numpy(), call.view("head_weights").numpy()
    queries, angles = tile.view(ROW_TILE, heads, dim).numpy(), table.numpy()
    for first, end in row_tiles(start, stop):
        projection.project(source[first:end], weight, tile)
        at = slice(first - start, end - start)
        form_records(record, queries, angles[first:end] if layout else angles[:0], codes[at], scaled[at])
