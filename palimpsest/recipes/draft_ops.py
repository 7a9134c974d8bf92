"""Contracts of a DFlash or DFlash2 drafter's ops: planned only, like those in ``ops``.

The drafter reads hidden rows tapped from the target, keeps keys of the accepted context, and drafts one block of tokens without
causality (https://arxiv.org/abs/2602.06036; DFlash2 adds a dynamic convolution and a candidate selector).
"""

from palimpsest.core.contract import OpContract
from palimpsest.kernels.sizes import KEY_TILE, linear_scratch, norm_scratch, tile_scratch
from palimpsest.recipes.ops import ACT, BLOCKS, ORDER, read, update, write

#: taps of a drafter that one step can name
MAX_TAPS = 16

TAP_HIDDEN = OpContract(
    name="tap_hidden",
    summary="the hidden rows a drafter reads after a layer: the residual stream, or the mix of attention-residual states",
    operands=(read("state", f"[rows,hidden] {ACT}"), *BLOCKS, write("tap", f"[rows,hidden] {ACT}")),
    params=("hidden", "blocks"),
    scratch=lambda hidden, blocks: tile_scratch(blocks + 1, hidden) if blocks else 0,
    exact=ORDER,
)
DRAFT_CONTEXT = OpContract(
    name="draft_context",
    summary="context = RMS norm of the projected concatenation of all taps",
    operands=(
        *(read(f"tap{i:02d}", f"[rows,hidden] {ACT}", optional=True) for i in range(MAX_TAPS)),
        read("fc", f"[hidden,taps*hidden] {ACT}"),
        read("norm", f"[hidden] {ACT}"),
        write("context", f"[rows,hidden] {ACT}"),
    ),
    params=("hidden", "taps"),
    scratch=lambda hidden, taps: linear_scratch(taps * hidden, hidden) + norm_scratch(hidden),
    exact=ORDER,
)
DRAFT_KEYS = OpContract(
    name="draft_keys",
    summary="keys and values (or latents) of this chunk's context rows for one drafter layer, appended to its cache",
    operands=(
        read("context", f"[rows,hidden] {ACT}"),
        read("weight", f"[record,hidden] {ACT}"),
        read("norm", f"[record norm] {ACT}"),
        write("records", f"[rows,record] {ACT}"),
        update("cache", f"[window,record] {ACT}"),
    ),
    params=("hidden", "record", "window"),
    scratch=lambda hidden, record, window: linear_scratch(hidden, record) + norm_scratch(record),
    exact=ORDER,
)
DRAFT_ANCHOR = OpContract(
    name="draft_anchor",
    summary="the block to draft: the target's next token, then mask tokens",
    operands=(read("logits", "[1,vocab] fp32"), write("block", "[block] i32")),
    params=("block", "mask"),
    scratch=lambda block, mask: 0,
    exact="ties by token id ascending",
)
DRAFT_CONV = OpContract(
    name="draft_conv",
    summary="grouped dynamic depthwise convolution before and after a sublayer: coefficients from the normed input",
    operands=(
        read("hidden", f"[block,hidden] {ACT}"),
        read("base", f"[2,taps,hidden] {ACT}"),
        read("projection", f"[2*taps*groups,hidden] {ACT}"),
        write("delta", "[block,2,taps,groups] fp32"),
    ),
    params=("hidden", "taps", "groups"),
    scratch=lambda hidden, taps, groups: linear_scratch(hidden, 2 * taps * groups),
    exact=ORDER,
)
DRAFT_ATTEND = OpContract(
    name="draft_attend",
    summary="one drafter layer's attention: block queries over the cached context and the block itself, not causal",
    operands=(
        read("hidden", f"[block,hidden] {ACT}"),
        read("delta", "[block,2,taps,groups] fp32", optional=True),
        read("cache", f"[window,record] {ACT}"),
        *(read(role, f"{ACT}", optional=True) for role in ("norm", "q_a", "q_norm", "q_b", "kv", "kv_norm", "kv_b", "o")),
        write("query", f"[block,heads,key dims] {ACT}"),
        write("context", "[block,heads,value dims] fp32"),
        write("partial", "[block,hidden] fp32"),
    ),
    params=("hidden", "heads", "key_dims", "value_dims", "window"),
    scratch=lambda hidden, heads, key_dims, value_dims, window: (
        linear_scratch(hidden, heads * key_dims) + tile_scratch(KEY_TILE, heads * value_dims)
    ),
    exact=ORDER,
)
DRAFT_CANDIDATES = OpContract(
    name="draft_candidates",
    summary="per drafted slot the largest logits and their tokens",
    operands=(read("logits", "[slots,vocab] fp32"), write("unary", "[slots,k] fp32"), write("candidates", "[slots,k] i64")),
    params=("slots", "k"),
    scratch=lambda slots, k: 0,
    exact="ties by token id ascending",
)
DRAFT_LATTICE = OpContract(
    name="draft_lattice",
    summary="edge scores between candidates of neighbouring slots",
    operands=(
        read("hidden", f"[block,hidden] {ACT}"),
        read("unary", "[slots,k] fp32"),
        read("candidates", "[slots,k] i64"),
        read("projection", f"[rank,hidden] {ACT}"),
        read("predecessors", f"[vocab,rank] {ACT}"),
        read("successors", f"[vocab,rank] {ACT}"),
        write("lattice", "[slots,k,k] fp32"),
    ),
    params=("hidden", "rank", "slots", "k"),
    scratch=lambda hidden, rank, slots, k: linear_scratch(hidden, rank) + 8 * k * rank,
    exact=ORDER,
)
DRAFT_PICK = OpContract(
    name="draft_pick",
    summary="drafted tokens: the largest logit of each slot, or the best walk through the lattice",
    operands=(
        read("logits", "[slots,vocab] fp32"),
        read("lattice", "[slots,k,k] fp32", optional=True),
        read("candidates", "[slots,k] i64", optional=True),
        write("tokens", "[slots] i32"),
    ),
    params=("slots",),
    scratch=lambda slots: 0,
    exact="ties by token id ascending",
)

#: every op here, by name
DRAFT_ONLY = {
    contract.name: contract
    for contract in (
        TAP_HIDDEN, DRAFT_CONTEXT, DRAFT_KEYS, DRAFT_ANCHOR, DRAFT_CONV, DRAFT_ATTEND, DRAFT_CANDIDATES, DRAFT_LATTICE,
        DRAFT_PICK,
    )
}  # fmt: skip
