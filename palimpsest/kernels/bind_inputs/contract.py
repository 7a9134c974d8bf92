"""Copy the caller's normed hidden rows into the plan and form the rotary table of their positions."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import tile_scratch


def _scratch(rope_dims: int) -> int:
    half = rope_dims // 2
    return tile_scratch(1, half) + tile_scratch(half, half, itemsize=8) if rope_dims else 0


CONTRACT = OpContract(
    name="bind_inputs",
    summary="hidden rows of this chunk, and cos/sin of their positions (angle = fp32(position) * inv_freq, rounded once)",
    operands=(
        Operand("inv_freq", "read", "[rope_dims/2] fp32", optional=True),
        Operand("hidden", "write", "[rows,hidden] bf16|fp32"),
        Operand("rope", "write", "[rows,rope_dims/2,2] fp32: cos, sin", optional=True),
    ),
    params=("rope_dims",),
    scratch=_scratch,
    exact="hidden bytes are the caller's, rounded to nearest even when narrower; cos and sin are fp64, rounded once to fp32",
)
