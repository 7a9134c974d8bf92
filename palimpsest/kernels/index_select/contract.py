"""Score the rows of this rank's slice against every visible key and keep the top-k, tile by tile."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels import sizes
from palimpsest.kernels.sizes import KEY_TILE, SELECT_ROWS


def _scratch(topk: int, heads: int, dim: int, format: str, engine: str = "portable", threads: int = 1, **_: object) -> int:
    if engine in sizes.AMX_ENGINES and sizes.amx_selects(format, dim):
        return threads * sizes.amx_select_scratch(topk, heads, dim)
    if engine in sizes.AVX_ENGINES and format == "fp8":
        return threads * sizes.avx_select_scratch(topk, heads, dim)
    if format == "fp8":
        return sizes.filter_scratch(topk, heads, dim)
    keys = KEY_TILE * (8 * dim + 4 + 4 + 8 + 1)
    queries = SELECT_ROWS * heads * (8 * dim + 8)
    state = SELECT_ROWS * (topk + KEY_TILE) * 8
    return keys + queries + sizes.exact_scratch(heads, KEY_TILE) + state + 12 * 64


CONTRACT = OpContract(
    name="index_select",
    summary="s[t,j] = k_scale[j] * sum_h w[t,h] * relu(q[t,h].k[j]), j <= history+t; the topk largest, ties to the lowest id",
    operands=(
        Operand("index_history", "read", "keys [tokens,dim] e4m3|fp32; scales [tokens] fp32 (fp8 only)"),
        Operand("index_query", "read", "[slice,heads,dim] e4m3|fp32"),
        Operand("head_weights", "read", "[slice,heads] fp32"),
        Operand("local_ids", "write", "[slice,topk] i32, ascending, padded with -1"),
        Operand("local_counts", "write", "counts [slice] i32; nans [slice] i32: visible scores that were NaN (ranked as -inf)"),
    ),
    params=("topk", "heads", "dim", "format", "ranks", "engine", "threads"),
    scratch=_scratch,
    exact="the selected set under score descending, then token id ascending; -0 equals +0; NaN counts as -inf",
)
