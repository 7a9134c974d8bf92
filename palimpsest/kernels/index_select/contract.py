"""Score the rows of this rank's slice against every visible key and keep the top-k, tile by tile."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import KEY_TILE, SELECT_ROWS


def _scratch(topk: int, heads: int, dim: int, **_: object) -> int:
    keys = KEY_TILE * dim * (8 + 4) + KEY_TILE * 8
    query = SELECT_ROWS * heads * (dim * 12 + 8)
    dots = heads * KEY_TILE * 8 + 6 * KEY_TILE * 8
    state = SELECT_ROWS * (topk + KEY_TILE) * 8
    return keys + query + dots + state + 16 * 64


CONTRACT = OpContract(
    name="index_select",
    summary="s[t,j] = k_scale[j] * sum_h w[t,h] * relu(q[t,h].k[j]) over j <= history+t; the topk largest, ties to the lowest token id",
    operands=(
        Operand("index_history", "read", "keys [tokens,dim] e4m3|fp32; scales [tokens] fp32 (fp8 only)"),
        Operand("index_query", "read", "[slice,heads,dim] e4m3|fp32"),
        Operand("head_weights", "read", "[slice,heads] fp32"),
        Operand("local_ids", "write", "[slice,topk] i32, ascending, padded with -1"),
        Operand("local_counts", "write", "counts [slice] i32; nans [slice] i32: visible scores that were NaN (ranked as -inf)"),
    ),
    params=("topk", "heads", "dim", "format", "ranks"),
    scratch=_scratch,
    exact="the selected set under score descending, then token id ascending; -0 equals +0; NaN counts as -inf",
)
