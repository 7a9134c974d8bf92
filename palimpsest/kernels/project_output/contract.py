"""Value up-projection, output gate and output projection of the local heads."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import ROW_TILE, linear_scratch


def _scratch(hidden: int, heads: int, total_heads: int, v_dim: int, kv_lora: int, gate: bool) -> int:
    levels = max(1, total_heads).bit_length() + 2
    weights = 4 * (v_dim * hidden * 2 + kv_lora * v_dim)
    return weights + linear_scratch(kv_lora, v_dim) + levels * ROW_TILE * hidden * 4 + ROW_TILE * (hidden + 3 * v_dim) * 4 + 64 * 64


CONTRACT = OpContract(
    name="project_output",
    summary="per local head: v = context @ uv[h].T, times sigmoid(hidden @ gate[h].T) when gated; partial = sum_h v @ o[h].T",
    operands=(
        Operand("context", "read", "[rows,heads,kv_lora] fp32"),
        Operand("hidden", "read", "[rows,hidden] bf16|fp32", optional=True),
        Operand("uv", "read", "[heads,v_dim,kv_lora] bf16|fp32"),
        Operand("gate", "read", "[heads*v_dim,hidden] bf16|fp32", optional=True),
        Operand("o", "read", "[hidden,heads*v_dim] bf16|fp32"),
        Operand("partial", "write", "[rows,hidden] fp32"),
    ),
    params=("hidden", "heads", "total_heads", "v_dim", "kv_lora", "gate"),
    scratch=_scratch,
    exact="heads are summed as a fixed binary tree over head groups of the whole model, so the final sum does not depend on the rank count",
)
