"""Append this chunk's index records to the pages this rank owns."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import ROW_TILE, linear_scratch


def _scratch(hidden: int, dim: int, **_: object) -> int:
    return linear_scratch(hidden, dim) + 8 * ROW_TILE * dim * 4 + 512


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
    params=("hidden", "dim", "eps", "rope_dims", "rope_layout", "hadamard", "scale_format", "format", "page", "ranks"),
    scratch=_scratch,
    exact="touches the records of tokens [history, history+rows) that this rank owns and nothing else",
)
