"""Index queries and head weights of the rows this rank selects for."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import (
    AMX_ENGINES,
    amx_query_scratch,
    hadamard_scratch,
    linear_scratch,
    quantise_scratch,
    rotation_scratch,
    tile_scratch,
)


def _scratch(
    hidden: int, q_lora: int, heads: int, dim: int, rope_dims: int, hadamard: bool, engine: str = "portable", **_: object
) -> int:
    weights = linear_scratch(hidden, heads, engine=engine) + tile_scratch(heads)
    query = (
        linear_scratch(q_lora, dim, resident=True, engine=engine)
        + rotation_scratch(rope_dims)
        + quantise_scratch(dim, dim)
        + tile_scratch(dim)
    )
    plain = weights + query + (hadamard_scratch(dim) if hadamard else 0)
    return max(plain, amx_query_scratch(q_lora, heads, dim)) if engine in AMX_ENGINES else plain


CONTRACT = OpContract(
    name="index_query",
    summary="q = rope(q_latent @ index_q.T), quantised per (row, head); w = hidden @ index_w.T * heads**-.5 * dim**-.5 * q_scale",
    operands=(
        Operand("hidden", "read", "[rows,hidden] bf16|fp32"),
        Operand("q_latent", "read", "[rows,q_lora] bf16|fp32"),
        Operand("index_q", "read", "[heads*dim,q_lora] bf16|fp32"),
        Operand("index_w", "read", "[heads,hidden] bf16|fp32"),
        Operand("rope", "read", "[rows,rope_dims/2,2] fp32", optional=True),
        Operand("index_query", "write", "[slice,heads,dim] e4m3|fp32"),
        Operand("head_weights", "write", "[slice,heads] fp32"),
    ),
    params=(
        "hidden",
        "q_lora",
        "heads",
        "dim",
        "rope_dims",
        "rope_layout",
        "hadamard",
        "scale_format",
        "format",
        "ranks",
        "engine",
    ),
    scratch=_scratch,
    exact="bytes depend on the row alone; the scale is max(amax,1e-4)/448, rounded up to a power of two for ue8m0",
)
