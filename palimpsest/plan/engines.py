"""What other engines would allocate for the same model and limits, beside our plan: ``palimpsest plan --compare``.

Nothing is measured here and nothing is guessed: each cell is a formula read in a named version of the engine, evaluated for one
request at the full prepared context on one rank, or it says why it cannot be computed from a configuration.
"""

from palimpsest.core.geometry import Geometry
from palimpsest.core.spec import Limits, Program
from palimpsest.plan import engines_other, engines_vllm
from palimpsest.plan.engines_cell import KINDS, MIB, SLOTS, Ask, Cell, Deployment, EngineBill, ask, unknown
from palimpsest.plan.plan import Plan

__all__ = ["KINDS", "MIB", "SLOTS", "Ask", "Cell", "Deployment", "EngineBill", "ask", "compare_rows", "ours"]

#: record formats found in public caches: (what, bytes per token and layer, formula, where it is written down)
PUBLIC_RECORDS = (
    ("index fp8", 132, "128 + 4", "vLLM v1/attention/backends/mla/indexer.py; lmdeploy backends/cuda/nsa.py"),
    ("index mxfp4", 68, "64 + 4", "vLLM model_executor/layers/sparse_attn_indexer.py"),
    ("latent fp8_ds_mla", 656, "512 + 4*4 + 64*2", "vLLM v1/attention/backends/mla/flashmla_sparse.py"),
    ("latent fp8_ds_mla of V4", 584, "448 + 64*2 + 8", "vLLM v1/attention/backends/mla/flashmla_sparse.py"),
    ("latent fp8_ds_mla of V4.1", 528, "512 + 16", "vLLM v1/attention/backends/mla/flashmla_sparse.py"),
    ("latent nvfp4_ds_mla", 352, "352", "vLLM v1/attention/backends/mla/flashmla_sparse.py"),
    ("latent bf16", 1152, "576*2", "vLLM v1/attention/backends/mla/flashmla_sparse.py"),
    ("latent fp8, one scale", 576, "512 + 64", "this project's K3.1 default"),
)


def compare_rows(
    geometry: Geometry, limits: Limits, program: Program, plan: Plan, deployment: Deployment | None = None
) -> tuple[EngineBill, ...]:
    """Every engine's bill on one rank, ours last. ``plan`` is a checked plan of ``program``, one full layer at ``limits``.

    Raises Unsupported when the ranks do not divide the heads.
    """
    a = ask(geometry, limits, deployment)
    others = (engines_other.sglang, engines_other.tensorrt, engines_other.lmdeploy, engines_other.llama)
    return (engines_vllm.bill(a), *(bill(a) for bill in others), ours(program, plan))


def ours(program: Program, plan: Plan) -> EngineBill:
    """Our slots, each a buffer of the plan; the total is the bytes under the histories plus score tile, ids and staging."""
    size = {place.buffer: place.nbytes for place in plan.places}
    early, late = program.histories[:2] if program.histories else ("", "latent_history")
    scratch = "".join(f"{s.name}.scratch" for s in program.steps if s.op == "index_select")[:200]
    chosen = tuple(name for name in ("ids", "local_ids", "counts", "local_counts") if name in size)
    source = f"plan {plan.digest[:12]}, {plan.placer}"
    span = max(size.get(late, 0), size.get(early, 0)) if plan.reuse == "on" else size.get(late, 0) + size.get(early, 0)

    def cell(slot: str, names: tuple[str, ...], note: str) -> Cell:
        held = tuple(name for name in names if name in size)
        if not held:
            return unknown(slot, "this layer keeps the ids of an earlier one and has no such buffer", source)
        symbols = tuple((name, size[name]) for name in held)
        text = " + ".join(f"({program.by_name[n].formula})" if len(held) > 1 else program.by_name[n].formula for n in held)
        return Cell(slot, sum(size[name] for name in held), "named", " + ".join(held), symbols, source, f"{text}; {note}")

    where = plan.by_name.get(early)
    total = span + sum(size.get(name, 0) for name in (scratch, *chosen, "staging"))
    spans = ("max({}, {})" if plan.reuse == "on" else "{} + {}").format(early, late) if early else late
    others = [name for name in (scratch, *chosen, "staging") if name in size]
    return EngineBill(
        "ours",
        f"plan {plan.digest[:12]}",
        "declared order, placed, checked, a certificate per shared byte" if plan.reuse == "on" else "off: --reuse off",
        (
            cell("index gather", (early,), f"on bytes from {where.offset:,} of the segment" if where else ""),
            cell("latent gather", (late,), "the whole context, in the cache's own records"),
            cell("logits", (scratch,), "scratch of one op: tiles of keys, no row is ever as wide as the context"),
            cell("ids", chosen, "of all rows, and of this rank's slice"),
            cell("exchange", ("staging",), "peers write here; shared by every collective"),
            Cell("total", total, "named", " + ".join([spans, *others]), tuple((n, size[n]) for n in (early, late, *others) if n),
                 source, f"the whole reusable segment, activations included, is {plan.peak:,} B"),
        ),
    )  # fmt: skip
