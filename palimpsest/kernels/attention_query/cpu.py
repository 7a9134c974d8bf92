"""attention_query, portable engine."""

from collections.abc import Mapping
from typing import Any

from palimpsest.kernels import linear
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.linear import Gemm, make_projection, row_tiles
from palimpsest.kernels.rope import Rotation
from palimpsest.kernels.sizes import ROW_TILE


def gemms(params: Mapping[str, Any]) -> list[Gemm]:
    query = linear.gemms(params["q_lora"], params["nope"] + params["rope_dims"])
    return query + linear.gemms(params["nope"], params["kv_lora"])


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. A head's weights stay resident while all row tiles pass."""
    scratch, p = call.scratch, call.params
    scratch.reset()
    nope, rope, latent = p["nope"], p["rope_dims"], p["kv_lora"]
    table = call.view("rope") if call.has("rope") else None
    source, out = call.view("q_latent"), call.view("query")
    weights = call.view("q_b").view(p["heads"], nope + rope, p["q_lora"])
    up = call.view("uk")
    down = make_projection(call, weights, p["q_lora"], nope + rope, resident=True)
    absorb = make_projection(call, up, nope, latent, resident=True)
    rotate = Rotation(scratch, rope, p["rope_layout"])
    q = scratch.take((ROW_TILE, nope + rope), "fp32")
    absorbed = scratch.take((ROW_TILE, latent), "fp32")
    for head in range(p["heads"] if chunk.rows else 0):
        down.load(weights[head])
        absorb.load(up[head].t())
        for first, end in row_tiles(0, chunk.rows):
            m = end - first
            down.apply(source[first:end], q)
            absorb.apply(q[:m, :nope], absorbed)
            rotate(q[:m, nope:], None if table is None else table[first:end])
            out[first:end, head, :latent].copy_(absorbed[:m])
            out[first:end, head, latent:].copy_(q[:m, nope:])
