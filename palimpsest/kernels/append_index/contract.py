"""Append this chunk's index records to the pages this rank owns."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import (
    hadamard_scratch,
    linear_scratch,
    norm_scratch,
    quantise_scratch,
    rotation_scratch,
    tile_scratch,
)


def _scratch(hidden: int, dim: int, rope_dims: int, hadamard: bool, engine: str = "portable", **_: object) -> int:
    record = norm_scratch(dim) + rotation_scratch(rope_dims) + quantise_scratch(dim, dim) + tile_scratch(dim)
    return linear_scratch(hidden, dim, resident=True, engine=engine) + record + (hadamard_scratch(dim) if hadamard else 0)


CONTRACT = OpContract(
    name="append_index",
    summary="k = rope(layer_norm(hidden @ index_k.T)), quantised per token; page layout: all values, then all scales",
    operands=(
        Operand("hidden", "read", "[rows,hidden] bf16|fp32"),
        Operand("index_k", "read", "[dim,hidden] bf16|fp32"),
        Operand("index_k_norm", "read", "[dim] bf16|fp32"),
        Operand("index_k_norm_bias", "read", "[dim] bf16|fp32"),
        Operand("rope", "read", "[rows,rope_dims/2,2] fp32", optional=True),
        Operand("index_cache", "update", "[rank_pages,page*record] u8: values of the page, then its fp32 scales"),
    ),
    params=("hidden", "dim", "eps", "rope_dims", "rope_layout", "hadamard", "scale_format", "format", "page", "ranks", "engine"),
    scratch=_scratch,
    exact="touches the records of tokens [history, history+rows) that this rank owns and nothing else",
)
