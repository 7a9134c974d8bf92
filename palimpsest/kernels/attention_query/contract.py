"""Absorbed attention query of the local heads: ``(W_UK[h]^T q_nope | rotated q_pe)``."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import linear_scratch, rotation_scratch, tile_scratch


def _scratch(q_lora: int, nope: int, rope_dims: int, kv_lora: int, engine: str = "portable", **_: object) -> int:
    weights = linear_scratch(q_lora, nope + rope_dims, resident=True, engine=engine) + linear_scratch(
        nope, kv_lora, resident=True, engine=engine
    )
    return weights + rotation_scratch(rope_dims) + tile_scratch(nope + rope_dims, kv_lora)


CONTRACT = OpContract(
    name="attention_query",
    summary="per local head: q = q_latent @ q_b[h].T; query = (q_nope @ uk[h] | rope(q_pe))",
    operands=(
        Operand("q_latent", "read", "[rows,q_lora] bf16|fp32"),
        Operand("q_b", "read", "[heads*(nope+rope_dims),q_lora] bf16|fp32"),
        Operand("uk", "read", "[heads,nope,kv_lora] bf16|fp32"),
        Operand("rope", "read", "[rows,rope_dims/2,2] fp32", optional=True),
        Operand("query", "write", "[rows,heads,kv_lora+rope_dims] bf16|fp32"),
    ),
    params=("q_lora", "heads", "nope", "rope_dims", "kv_lora", "rope_layout", "engine"),
    scratch=_scratch,
    exact="a head's bytes depend on its row, its weights and its rotary table alone: not on which rank holds it",
)
