"""Contracts of the whole-model ops that can be planned but not run: no kernel implements them.

They have the same form as the contracts in ``kernels/``, so a Program built from both is planned and checked as one. Asking
``kernels.table`` for one of these raises UnknownName with its name: a whole-model program is refused, never half run. Scratch is
what an engine that works in row tiles needs.
"""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import ROW_TILE, linear_scratch, norm_scratch, tile_scratch

#: block states of an attention-residual stream that one step can name
MAX_BLOCKS = 64
#: tokens of one chunk of the linear-attention scan: its triangular systems are [chunk, chunk] per head
KDA_CHUNK = 64

ACT = "bf16|fp32"
_STORED = "as stored: bf16|fp32, e4m3 with fp32 block scales, or packed mxfp4 with e8m0 scales"


def read(role: str, layout: str, optional: bool = False) -> Operand:
    return Operand(role, "read", layout, optional)


def write(role: str, layout: str) -> Operand:
    return Operand(role, "write", layout)


def update(role: str, layout: str) -> Operand:
    return Operand(role, "update", layout)


BLOCKS = tuple(read(f"block{i:02d}", f"[rows,hidden] {ACT}", optional=True) for i in range(MAX_BLOCKS))
ORDER = "sums run in an order fixed by the geometry, so a row's bits do not depend on the other rows"


def _two_linears(hidden: int, inter: int) -> int:
    return 2 * linear_scratch(hidden, inter) + tile_scratch(inter)


EMBED_ROWS = OpContract(
    name="embed_rows",
    summary="rows of the vocabulary-split embedding, exchanged so that every rank has all of them",
    operands=(
        read("tokens", "[rows] i32"),
        read("embedding", f"[vocab/ranks,hidden] {ACT}"),
        update("staging", "[staging bytes] u8"),
        write("output", f"[rows,hidden] {ACT}"),
    ),
    params=("hidden", "ranks"),
    scratch=lambda hidden, ranks: 0,
    exact="every byte",
    collective=True,
)
ROPE_TABLE = OpContract(
    name="rope_table",
    summary="cos and sin of this chunk's positions, once for all layers",
    operands=(read("inv_freq", "[rope_dims/2] fp32"), write("rope", "[rows,rope_dims/2,2] fp32")),
    params=("rope_dims",),
    scratch=lambda rope_dims: tile_scratch(1, rope_dims // 2) + tile_scratch(rope_dims // 2, rope_dims // 2, itemsize=8),
    exact="as bind_inputs",
)
RMS_NORM = OpContract(
    name="rms_norm",
    summary="output = input / sqrt(mean(input^2) + eps) * weight, over the last axis; ``rows`` 0 means all, 1 the last row",
    operands=(read("input", f"[rows,hidden] {ACT}"), read("weight", f"[hidden] {ACT}"), write("output", f"[rows,hidden] {ACT}")),
    params=("hidden", "rows"),
    scratch=lambda hidden, rows: norm_scratch(hidden),
    exact=ORDER,
)
MIX_NORM = OpContract(
    name="mix_norm",
    summary="attention residual: softmax over block states and the running one of <state, w> / rms(state), mix, then RMS norm",
    operands=(
        read("state", f"[rows,hidden] {ACT}"),
        *BLOCKS,
        read("mix_norm", f"[hidden] {ACT}"),
        read("mix_proj", f"[1,hidden] {ACT}"),
        read("weight", f"[hidden] {ACT}"),
        write("output", f"[rows,hidden] {ACT}"),
    ),
    params=("hidden", "blocks", "rows"),
    scratch=lambda hidden, blocks, rows: norm_scratch(hidden) + tile_scratch(blocks + 1, hidden),
    exact=ORDER,
)
ADD_RESIDUAL = OpContract(
    name="add_residual",
    summary="state += output, rounded once per element",
    operands=(update("state", f"[rows,hidden] {ACT}"), read("output", f"[rows,hidden] {ACT}")),
    params=("hidden",),
    scratch=lambda hidden: 0,
    exact="every byte",
)
MLP_UP = OpContract(
    name="mlp_up",
    summary="gated activation of this rank's intermediate columns; gate and up exist only as one row tile",
    operands=(
        read("input", f"[rows,hidden] {ACT}"),
        read("gate", f"[inter/ranks,hidden] {_STORED}"),
        read("up", f"[inter/ranks,hidden] {_STORED}"),
        write("hidden", f"[rows,inter/ranks] {ACT}"),
    ),
    params=("hidden", "inter"),
    scratch=_two_linears,
    exact=ORDER,
)
MLP_DOWN = OpContract(
    name="mlp_down",
    summary="partial sums of the output over this rank's intermediate columns",
    operands=(
        read("hidden", f"[rows,inter/ranks] {ACT}"),
        read("down", f"[hidden,inter/ranks] {_STORED}"),
        write("partial", "[rows,hidden] fp32"),
    ),
    params=("hidden", "inter"),
    scratch=lambda hidden, inter: linear_scratch(inter, hidden),
    exact=ORDER,
)
MLP_DOWN_ADD = OpContract(
    name="mlp_down_add",
    summary="mlp_down added to partial sums that are there already",
    operands=(
        read("hidden", f"[rows,inter/ranks] {ACT}"),
        read("down", f"[hidden,inter/ranks] {_STORED}"),
        update("partial", "[rows,hidden] fp32"),
    ),
    params=("hidden", "inter"),
    scratch=lambda hidden, inter: linear_scratch(inter, hidden),
    exact=ORDER,
)
ROUTE_EXPERTS = OpContract(
    name="route_experts",
    summary="sigmoid scores, plus the bias for choosing only; the chosen scores are renormalised and scaled",
    operands=(
        read("input", f"[rows,hidden] {ACT}"),
        read("router", f"[experts,hidden] {ACT}"),
        read("bias", "[experts] fp32"),
        write("expert_ids", "[rows,each] i32"),
        write("expert_weights", "[rows,each] fp32"),
    ),
    params=("hidden", "experts", "each"),
    scratch=lambda hidden, experts, each: linear_scratch(hidden, experts) + tile_scratch(experts, experts),
    exact="chosen sets: ties by expert number ascending",
)
DISPATCH_EXPERTS = OpContract(
    name="dispatch_experts",
    summary="(row, slot) pairs sorted by pass, then expert, then row",
    operands=(
        read("expert_ids", "[rows,each] i32"),
        write("pairs", "[rows,each] i32"),
        write("offsets", "[passes,experts+1] i32"),
    ),
    params=("experts", "each", "passes"),
    scratch=lambda experts, each, passes: 8 * experts,
    exact="every byte",
)
RUN_EXPERTS = OpContract(
    name="run_experts",
    summary="this rank's columns of the routed experts, pass after pass; a row's slots add in slot order",
    operands=(
        read("input", f"[rows,width] {ACT}"),
        read("expert_weights", "[rows,each] fp32"),
        read("pairs", "[rows,each] i32"),
        read("offsets", "[passes,experts+1] i32"),
        read("gate", f"[experts,inter/ranks,width] {_STORED}"),
        read("up", f"[experts,inter/ranks,width] {_STORED}"),
        read("down", f"[experts,width,inter/ranks] {_STORED}"),
        write("hidden", f"[pairs,inter/ranks] {ACT}"),
        write("output", f"[pairs,width] {ACT}"),
        write("partial", "[rows,width] fp32"),
    ),
    params=("width", "inter", "experts", "each", "passes"),
    scratch=lambda width, inter, experts, each, passes: _two_linears(width, inter) + linear_scratch(inter, width),
    exact=ORDER,
)
LATENT_DOWN = OpContract(
    name="latent_down",
    summary="rows projected to the width the routed experts work in",
    operands=(
        read("input", f"[rows,hidden] {ACT}"),
        read("weight", f"[width,hidden] {_STORED}"),
        write("output", f"[rows,width] {ACT}"),
    ),
    params=("hidden", "width"),
    scratch=lambda hidden, width: linear_scratch(depth=hidden, columns=width),
    exact=ORDER,
)
LATENT_UP = OpContract(
    name="latent_up",
    summary="output += the routed sum projected back to the hidden size",
    operands=(
        read("input", f"[rows,width] {ACT}"),
        read("weight", f"[hidden,width] {_STORED}"),
        update("output", f"[rows,hidden] {ACT}"),
    ),
    params=("hidden", "width"),
    scratch=lambda hidden, width: linear_scratch(width, hidden),
    exact=ORDER,
)
KDA_PROJECT = OpContract(
    name="kda_project",
    summary="q, k and v of the local heads before their convolutions",
    operands=(
        read("input", f"[rows,hidden] {ACT}"),
        *(read(role, f"[heads*dim,hidden] {_STORED}") for role in ("q", "k", "v")),
        write("raw", f"[rows,3,heads,dim] {ACT}"),
    ),
    params=("hidden", "heads", "dim"),
    scratch=lambda hidden, heads, dim: linear_scratch(hidden, heads * dim),
    exact=ORDER,
)
KDA_CONV = OpContract(
    name="kda_conv",
    summary="causal depthwise convolution and SiLU over q, k, v; q and k normalised; kernel-1 rows stay for the next chunk",
    operands=(
        read("raw", f"[rows,3,heads,dim] {ACT}"),
        *(read(f"{role}_conv", "[heads*dim,1,kernel] fp32") for role in ("q", "k", "v")),
        update("conv_state", f"[kernel-1,3,heads,dim] {ACT}"),
        write("qkv", f"[rows,3,heads,dim] {ACT}"),
    ),
    params=("heads", "dim", "kernel"),
    scratch=lambda heads, dim, kernel: 4 * (ROW_TILE + kernel - 1) * 3 * heads * dim,
    exact=ORDER,
)
KDA_GATES = OpContract(
    name="kda_gates",
    summary="log decay per channel and write strength per head",
    operands=(
        read("input", f"[rows,hidden] {ACT}"),
        read("f_a", f"[dim,hidden] {_STORED}"),
        read("f_b", f"[heads*dim,dim] {_STORED}"),
        read("b", f"[heads,hidden] {_STORED}"),
        read("a_log", "[heads] fp32"),
        read("dt_bias", "[heads*dim] fp32"),
        write("decay", "[rows,heads,dim] fp32"),
        write("beta", "[rows,heads] fp32"),
    ),
    params=("hidden", "heads", "dim"),
    scratch=lambda hidden, heads, dim: (
        linear_scratch(hidden, dim) + linear_scratch(dim, heads * dim) + linear_scratch(hidden, heads)
    ),
    exact=ORDER,
)
KDA_SCAN = OpContract(
    name="kda_scan",
    summary="gated delta rule in chunks of KDA_CHUNK tokens: S = diag(e^g) S; S += beta k (v - S^T k)^T; out = S^T q",
    operands=(
        read("qkv", f"[rows,3,heads,dim] {ACT}"),
        read("decay", "[rows,heads,dim] fp32"),
        read("beta", "[rows,heads] fp32"),
        update("state", "[heads,dim,dim] fp32"),
        write("out", f"[rows,heads,dim] {ACT}"),
    ),
    params=("heads", "dim", "chunk"),
    # per head: decayed q, k, k and beta-scaled k, v, new v in fp32, two triangular matrices
    scratch=lambda heads, dim, chunk: 4 * heads * (6 * chunk * dim + 2 * chunk * chunk),
    exact=ORDER,
)
KDA_OUTPUT = OpContract(
    name="kda_output",
    summary="partial = (per-head RMS norm of out, times sigmoid(input @ gate)) @ o over the local heads",
    operands=(
        read("input", f"[rows,hidden] {ACT}"),
        read("out", f"[rows,heads,dim] {ACT}"),
        read("gate", f"[heads*dim,hidden] {_STORED}"),
        read("o_norm", "[dim] fp32"),
        read("o", f"[hidden,heads*dim] {_STORED}"),
        write("partial", "[rows,hidden] fp32"),
    ),
    params=("hidden", "heads", "dim"),
    scratch=lambda hidden, heads, dim: (
        linear_scratch(hidden, heads * dim) + linear_scratch(heads * dim, hidden) + norm_scratch(dim)
    ),
    exact=ORDER,
)
LAST_LOGITS = OpContract(
    name="last_logits",
    summary="logits of the given rows over this rank's part of the vocabulary",
    operands=(
        read("input", f"[rows,hidden] {ACT}"),
        read("head", f"[vocab/ranks,hidden] {ACT}"),
        write("part", "[rows,vocab/ranks] fp32"),
    ),
    params=("hidden", "vocab"),
    scratch=lambda hidden, vocab: linear_scratch(depth=hidden, columns=vocab),
    exact=ORDER,
)
GATHER_LOGITS = OpContract(
    name="gather_logits",
    summary="the whole vocabulary's logits on every rank",
    operands=(
        read("part", "[rows,vocab/ranks] fp32"),
        update("staging", "[staging bytes] u8"),
        write("logits", "[rows,vocab] fp32"),
    ),
    params=("vocab", "ranks"),
    scratch=lambda vocab, ranks: 0,
    exact="every byte",
    collective=True,
)
#: every op here, by name
PLANNED_ONLY = {
    contract.name: contract
    for contract in (
        EMBED_ROWS, ROPE_TABLE, RMS_NORM, MIX_NORM, ADD_RESIDUAL, MLP_UP, MLP_DOWN, MLP_DOWN_ADD, ROUTE_EXPERTS, DISPATCH_EXPERTS,
        RUN_EXPERTS, LATENT_DOWN, LATENT_UP, KDA_PROJECT, KDA_CONV, KDA_GATES, KDA_SCAN, KDA_OUTPUT, LAST_LOGITS, GATHER_LOGITS,
    )
}  # fmt: skip
