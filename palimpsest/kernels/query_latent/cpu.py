"""query_latent, portable engine."""

from collections.abc import Mapping
from typing import Any

from palimpsest.kernels import linear
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.linear import Gemm, make_projection, row_tiles
from palimpsest.kernels.norms import RowNorm
from palimpsest.kernels.sizes import ROW_TILE


def gemms(params: Mapping[str, Any]) -> list[Gemm]:
    return linear.gemms(params["hidden"], params["q_lora"])


def run(call: Call, chunk: Chunk) -> None:
    """See the contract: fp32 GEMM, norm in fp64, one rounding to fp32, one to the activation dtype."""
    scratch, width = call.scratch, call.params["q_lora"]
    scratch.reset()
    hidden, weight, out = call.view("hidden"), call.view("q_a"), call.view("q_latent")
    projection = make_projection(call, weight, call.params["hidden"], width)
    norm = RowNorm(scratch, call.view("q_a_norm"), call.params["eps"])
    tile = scratch.take((ROW_TILE, width), "fp32")
    for first, end in row_tiles(0, chunk.rows):
        projection.project(hidden[first:end], weight, tile)
        norm(tile)
        out[first:end].copy_(tile[: end - first])
