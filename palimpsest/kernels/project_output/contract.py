"""Value up-projection, output gate and output projection of the local heads."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import linear_scratch, tile_scratch


def _scratch(hidden: int, heads: int, total_heads: int, v_dim: int, kv_lora: int, gate: bool, engine: str = "portable") -> int:
    # one open subtree per level of the rank's head groups, the group being summed, and one head's product
    subtrees = (heads // (total_heads // (total_heads & -total_heads))).bit_length()
    weights = (
        linear_scratch(kv_lora, v_dim, engine=engine)
        + linear_scratch(v_dim, hidden, engine=engine)
        + (linear_scratch(hidden, v_dim, engine=engine) if gate else 0)
    )
    return weights + tile_scratch(v_dim, v_dim, *[hidden] * (subtrees + 1))


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
    params=("hidden", "heads", "total_heads", "v_dim", "kv_lora", "gate", "engine"),
    scratch=_scratch,
    exact="heads are summed as a fixed binary tree over head groups of the whole model, whatever the rank count",
)
