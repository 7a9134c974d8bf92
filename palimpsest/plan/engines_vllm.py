"""vLLM 0.33.0, the DeepSeek-V3.2 / GLM-5.x / K3.1 path: workspace slots, the logits budget, and its prefill chunker.

One workspace per (ubatch, lane) holds the maximum of what any caller asks for at once, every view from offset 0: the index
gather and the latent gather already lie on the same bytes, by convention and not by a proof.
"""

from dataclasses import dataclass

from palimpsest.core.errors import BadConfig
from palimpsest.core.units import align_up
from palimpsest.plan.engines_cell import MIB, Ask, Cell, EngineBill, r256

VERSION = "0.33.0"
#: MiB of VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
LOGITS_MIB = 512
#: heads of the padded prefill kernel
HEAD_PADDING = 64
#: MiB of VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
FLASHINFER_MIB = 394

_INDEXER = "v1/attention/backends/mla/indexer.py"
_SPARSE = "model_executor/layers/sparse_attn_indexer.py"
_MLA = "v1/attention/backends/mla/flashmla_sparse.py::__init__"


def factor(context: int) -> int:
    """``sparse_mla_prefill_workspace_factor`` when nobody sets it; resolved once, from the declared context."""
    return 5 if context <= 262_144 else 2


def gather_rows(a: Ask, f: int, divide: int = 1) -> int:
    """Rows of the index gather workspace; ``divide`` is a compress ratio or index_kpool."""
    return a.L * (a.D * 2 // (a.I + 4)) * f // divide


def index_gather(a: Ask, rows: int, record: str = "fp8") -> int:
    """Bytes of the index gather: values and scales apart, then 1 MiB for the radix top-k."""
    values = a.I if record == "fp8" else a.I // 2
    return r256(rows * values) + r256(rows * 4) + MIB


def latent_prefill(a: Ask, f: int, *, padded: bool = True) -> int:
    """Bytes of the sparse prefill's one simultaneous request: query, gathered latents, padded query and outputs.

    ``padded=False`` is the earlier source, which had neither padded query nor output slots.
    """
    hp = align_up(a.h, HEAD_PADDING)
    found = a.T * a.h * a.D * 2 + f * a.L * a.D * 2
    return found + a.T * hp * a.D * 2 + a.T * hp * a.V * 2 + a.T * a.h * a.V * 2 if padded else found


def v4_gather(a: Ask, *, ratio: int, window: int, dim: int, image: int = 0, chunk: int = 4) -> int:
    """Bytes of DeepSeek-V4's gather (models/deepseek_v4/nvidia/flashmla.py): ``chunk`` requests of compressed context."""
    keys = chunk * (-(-a.L // ratio) + window + a.T) * dim * 2
    return keys + a.T * align_up(a.K + window + image, 128) * 4 + a.T * 4


@dataclass(frozen=True)
class PrefillTile:
    """Rows [row_start, row_stop), counted over requests [start, stop) together; ``gathers`` is False when the tile reuses the
    keys that the tile before it gathered.
    """

    start: int
    stop: int
    row_start: int
    row_stop: int
    gathers: bool


def prefill_tiles(contexts: list[int], rows: list[int], gather: int, elements: int) -> list[PrefillTile]:
    """How the indexer cuts one step (``_split_indexer_prefill_chunks``).

    contexts, rows: live context and query rows of each request; gather: rows of the gather workspace; elements: logits budget
    Neighbouring requests are packed while their contexts fit the workspace and rows times contexts fits the budget. A request
    that fits no pack stands alone and is cut into row tiles, of which only the first gathers. Raises BadConfig for lists that
    do not describe one step.
    """
    if len(contexts) != len(rows) or any(r < 1 or c < r for c, r in zip(contexts, rows, strict=False)):
        raise BadConfig(f"{len(contexts)} contexts and {len(rows)} row counts; each request has 1 <= rows <= context")
    tiles: list[PrefillTile] = []
    start = 0
    while start < len(contexts):
        keys, queries, stop = contexts[start], rows[start], start + 1
        if keys <= gather and keys * queries <= elements:
            while stop < len(contexts):
                wider, taller = keys + contexts[stop], queries + rows[stop]
                if wider > gather or wider * taller > elements:
                    break
                keys, queries, stop = wider, taller, stop + 1
        height = max(1, elements // keys)
        for at in range(0, queries, height):
            tiles.append(PrefillTile(start, stop, at, min(at + height, queries), at == 0))
        start = stop
    return tiles


def bill(a: Ask) -> EngineBill:
    """Every slot of one rank."""
    f = factor(a.L)
    rows, hp = gather_rows(a, f), align_up(a.h, HEAD_PADDING)
    gather, attend = index_gather(a, rows), latent_prefill(a, f)
    ids, exchange, logits = a.T * a.K * 4, 2 * a.T * a.K * 4, LOGITS_MIB * MIB
    limits = (*a.pick("L T h D V"), ("f", f), ("hp", hp))
    latent_text = "T*h*D*2 + f*L*D*2 + T*hp*D*2 + T*hp*V*2 + T*h*V*2"
    cells = (
        Cell("index gather", gather, "named", "r256(R*I) + r256(R*4) + MiB where R = L*(D*2 // (I + 4))*f",
             (*a.pick("L D I"), ("f", f)), f"{_SPARSE}::_gather_workspace_shapes; {_INDEXER}::get_max_prefill_buffer_size",
             f"{rows:,} rows: {rows // a.L} contexts; f is fixed before automatic fitting may lower L"),
        Cell("latent gather", attend, "named", latent_text, limits, _MLA,
             f"{f} contexts beside query, padded query and outputs; heads padded to {hp}"),
        Cell("logits", logits, "hidden", "M*MiB", (("M", LOGITS_MIB),),
             f"{_INDEXER}::_split_indexer_prefill_chunks; {_SPARSE}",
             "M = VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, held free by a dummy of that size; by reading, two tiles alive take 2 x M "
             "and 2.5 x M on SM100"),
        Cell("ids", ids, "named", "T*K*4", a.pick("T K"), _SPARSE),
        Cell("exchange", exchange, "named", "2*T*K*4", a.pick("T K"), _SPARSE,
             "held free by a dummy when query rows are sharded over ranks"),
        Cell("total", max(gather, attend) + logits + ids + exchange, "named", "max(G, A) + M*MiB + T*K*4 + 2*T*K*4",
             (("G", gather), ("A", attend), ("M", LOGITS_MIB), *a.pick("T K")), "v1/worker/workspace.py",
             "one workspace of the larger request, plus what dummies hold free; not counted: the second logits tile"),
        Cell("workspace, FlashInfer backend", FLASHINFER_MIB * MIB, "named", "M*MiB", (("M", FLASHINFER_MIB),),
             "v1/attention/backends/mla/flashinfer_mla_sparse.py",
             "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE; instead of the FlashMLA slots; decode context parallelism adds an LSE slab"),
    )  # fmt: skip
    return EngineBill("vLLM", VERSION, "implicit: one workspace, the maximum of all requests, no lifetime proof", cells)
