"""Steps that at least two recipes share: one sparse-attention sublayer of a prefill chunk, on one tensor-parallel rank.

The program is the same on every rank; what differs (which rows, pages and heads are mine) is arithmetic in ``ranks/layout.py``.
Sizes are the prepared maximum. The index history is gathered, read and finished before the latent history is gathered: that
order, and nothing else, is what lets the planner put one on the bytes of the other.
"""

from typing import Any

from palimpsest.core.errors import Unsupported
from palimpsest.core.geometry import Formats, Geometry, index_record_bytes, latent_record_bytes
from palimpsest.core.spec import Buffer, Limits, Plane, Program, Step
from palimpsest.core.units import align_up, dtype_bytes
from palimpsest.kernels import sizes
from palimpsest.kernels.append_index.contract import CONTRACT as APPEND_INDEX
from palimpsest.kernels.append_latent.contract import CONTRACT as APPEND_LATENT
from palimpsest.kernels.attention_query.contract import CONTRACT as ATTENTION_QUERY
from palimpsest.kernels.barrier.contract import CONTRACT as BARRIER
from palimpsest.kernels.bind_inputs.contract import CONTRACT as BIND_INPUTS
from palimpsest.kernels.exchange_ids.contract import CONTRACT as EXCHANGE_IDS
from palimpsest.kernels.gather_history.contract import CONTRACT as GATHER_HISTORY
from palimpsest.kernels.index_query.contract import CONTRACT as INDEX_QUERY
from palimpsest.kernels.index_select.contract import CONTRACT as INDEX_SELECT
from palimpsest.kernels.project_output.contract import CONTRACT as PROJECT_OUTPUT
from palimpsest.kernels.query_latent.contract import CONTRACT as QUERY_LATENT
from palimpsest.kernels.reduce_output.contract import CONTRACT as REDUCE_OUTPUT
from palimpsest.kernels.sparse_attend.contract import CONTRACT as SPARSE_ATTEND


def layer_program(
    geometry: Geometry, limits: Limits, formats: Formats, layer: int, *, engine: str = "portable", threads: int = 1
) -> Program:
    """The attention sublayer of 0-based ``layer``: its input is the normed hidden rows, its output the projected rows.

    engine, threads: what the steps will run on, and on how many threads where an op uses them: scratch depends on both.
    A ``shared`` layer has no index steps: ``ids`` and ``counts`` are inputs kept from the full layer before it.
    Raises Unsupported for a layer without sparse attention and for a rank count that does not divide the heads.
    """
    kind = _layer_kind(geometry, limits, layer)
    how = {"engine": engine, "threads": threads}
    buffers = _common_buffers(geometry, limits, formats)
    steps = [_bind(geometry)]
    steps += [*_query_steps(geometry, limits, engine), _append_latent(geometry, limits, formats, engine)]
    if kind == "full":
        buffers += _index_buffers(geometry, limits, formats)
        steps += _index_steps(geometry, limits, formats, how)
    steps += _attend_steps(geometry, limits, formats, how)
    rope = geometry.rope.layout != "none" or geometry.indexer.rope_layout != "none"
    if not rope:
        buffers = [b for b in buffers if b.name not in ("inv_freq", "rope")]
    return Program(
        name=f"{geometry.name}/layer{layer}",
        limits=limits,
        buffers=tuple(buffers),
        steps=tuple(steps),
        histories=("index_history", "latent_history") if kind == "full" else (),
        inputs=() if kind == "full" else ("ids", "counts"),
        outputs=("output",),
        facts=(
            ("family", geometry.family),
            ("layer", layer),
            ("kind", kind),
            ("topk", geometry.indexer.topk),
            ("index_format", formats.index),
            ("index_record_bytes", index_record_bytes(geometry, formats)),
            ("latent_format", formats.latent),
            ("latent_record_bytes", latent_record_bytes(geometry, formats)),
            ("activation", formats.activation),
            ("weights", formats.weights),
        ),
    )


def _layer_kind(geometry: Geometry, limits: Limits, layer: int) -> str:
    if not 0 <= layer < geometry.layers:
        raise Unsupported(f"{geometry.name} has layers 0..{geometry.layers - 1}; layer {layer} does not exist")
    kind = geometry.schedule[layer]
    if kind == "linear":
        shown = ", ".join(map(str, geometry.sparse_layers[:8]))
        raise Unsupported(f"layer {layer} of {geometry.name} is linear attention, not sparse; sparse layers are {shown}, ...")
    ranks = limits.ranks
    if ranks & (ranks - 1) or geometry.heads % ranks:
        raise Unsupported(
            f"{ranks} ranks: the output sum is a binary tree over ranks, so ranks must be a power of two that divides "
            f"the {geometry.heads} heads of {geometry.name}; use one of "
            f"{', '.join(str(1 << i) for i in range(12) if geometry.heads % (1 << i) == 0)}"
        )
    if geometry.indexer.topk > limits.tokens:
        raise Unsupported(
            f"top-k {geometry.indexer.topk} exceeds the context of {limits.tokens} tokens; prepare at least that many"
        )
    return kind


def _plain(name: str, kind: str, dtype: str, shape: dict[str, int], formula: str) -> Buffer:
    """A buffer of one plane; ``shape`` maps ``axis`` or ``axis:label`` to a size."""
    plane = Plane(name, dtype, tuple(shape.values()), tuple(axis.split(":")[0] for axis in shape))
    return Buffer(name, kind, (plane,), formula)


def _common_buffers(g: Geometry, limits: Limits, formats: Formats) -> list[Buffer]:
    rows, ranks, act, w = limits.rows, limits.ranks, formats.activation, formats.weights
    heads, record = g.heads // ranks, latent_record_bytes(g, formats)
    half = max(1, g.rope.dims // 2)
    b = dtype_bytes(act)
    buffers = [
        _plain("inv_freq", "table", "fp32", {"fixed": half}, f"{half} x 4"),
        _plain("signals", "signal", "i64", {"ranks": ranks}, "ranks x 8"),
        _plain("staging", "staging", "u8", {"fixed": staging_bytes(g, limits, formats)}, "one round of the largest collective"),
        _plain(
            "latent_cache",
            "persistent",
            "u8",
            {"pages": limits.rank_pages, "fixed": limits.page * record},
            f"pages/ranks x {limits.page} x {record}",
        ),
        _plain("hidden", "reusable", act, {"rows": rows, "fixed": g.hidden}, f"rows x {g.hidden} x {b}"),
        _plain("rope", "reusable", "fp32", {"rows": rows, "fixed:pairs": half, "fixed:cos_sin": 2}, f"rows x {half} x 8"),
        _plain("q_latent", "reusable", act, {"rows": rows, "fixed": g.q_lora}, f"rows x {g.q_lora} x {b}"),
        _plain(
            "query",
            "reusable",
            act,
            {"rows": rows, "heads": heads, "fixed": g.latent_dim},
            f"rows x {heads} heads x {g.latent_dim} x {b}",
        ),
        _plain("ids", "reusable", "i32", {"rows": rows, "topk": g.indexer.topk}, f"rows x {g.indexer.topk} x 4"),
        _plain("counts", "reusable", "i32", {"rows": rows}, "rows x 4"),
        _plain("latent_history", "reusable", "u8", {"tokens": limits.tokens, "fixed": record}, f"tokens x {record}"),
        _plain(
            "context",
            "reusable",
            "fp32",
            {"rows": rows, "heads": heads, "fixed": g.kv_lora},
            f"rows x {heads} heads x {g.kv_lora} x 4",
        ),
        _plain("partial", "reusable", "fp32", {"rows": rows, "fixed": g.hidden}, f"rows x {g.hidden} x 4"),
        _plain("output", "reusable", act, {"rows": rows, "fixed": g.hidden}, f"rows x {g.hidden} x {b}"),
    ]
    weights = {
        "q_a": (g.q_lora, g.hidden),
        "q_a_norm": (g.q_lora,),
        "q_b": (heads * (g.nope + g.rope.dims), g.q_lora),
        "kv_a": (g.latent_dim, g.hidden),
        "kv_a_norm": (g.kv_lora,),
        "uk": (heads, g.nope, g.kv_lora),
        "uv": (heads, g.v_dim, g.kv_lora),
        "o": (g.hidden, heads * g.v_dim),
    }
    if g.output_gate:
        weights["gate"] = (heads * g.v_dim, g.hidden)
    return buffers + [_weight(name, shape, w) for name, shape in weights.items()]


def _weight(name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
    formula = " x ".join(map(str, shape)) + f" x {dtype_bytes(dtype)}"
    return Buffer(f"w.{name}", "weights", (Plane(name, dtype, shape, ("fixed",) * len(shape)),), formula)


def _index_buffers(g: Geometry, limits: Limits, formats: Formats) -> list[Buffer]:
    ix, s, record = g.indexer, limits.slice_rows, index_record_bytes(g, formats)
    stored = "e4m3" if formats.index == "fp8" else "fp32"
    planes = [Plane("keys", stored, (limits.tokens, ix.dim), ("tokens", "fixed"))]
    if formats.index == "fp8":
        planes.append(Plane("scales", "fp32", (limits.tokens,), ("tokens",)))
    weights = {
        "index_q": (ix.heads * ix.dim, g.q_lora),
        "index_k": (ix.dim, g.hidden),
        "index_k_norm": (ix.dim,),
        "index_k_norm_bias": (ix.dim,),
        "index_w": (ix.heads, g.hidden),
    }
    counts = (Plane("counts", "i32", (s,), ("slice",)), Plane("nans", "i32", (s,), ("slice",)))
    return [
        _plain(
            "index_cache",
            "persistent",
            "u8",
            {"pages": limits.rank_pages, "fixed": limits.page * record},
            f"pages/ranks x {limits.page} x {record}",
        ),
        Buffer("index_history", "reusable", tuple(planes), f"tokens x {record}"),
        _plain(
            "index_query",
            "reusable",
            stored,
            {"slice": s, "heads": ix.heads, "fixed": ix.dim},
            f"rows/ranks x {ix.heads} x {ix.dim} x {dtype_bytes(stored)}",
        ),
        _plain("head_weights", "reusable", "fp32", {"slice": s, "heads": ix.heads}, f"rows/ranks x {ix.heads} x 4"),
        _plain("local_ids", "reusable", "i32", {"slice": s, "topk": ix.topk}, f"rows/ranks x {ix.topk} x 4"),
        Buffer("local_counts", "reusable", counts, "rows/ranks x 8"),
        *(_weight(name, shape, formats.weights) for name, shape in weights.items()),
    ]


def _rope_role(layout: str) -> dict[str, str]:
    return {} if layout == "none" else {"rope": "rope"}


def _bind(g: Geometry) -> Step:
    rope = g.rope.layout != "none" or g.indexer.rope_layout != "none"
    roles = {"hidden": "hidden"} | ({"rope": "rope", "inv_freq": "inv_freq"} if rope else {})
    return BIND_INPUTS.step("bind_inputs", "p0", roles, rope_dims=g.rope.dims if rope else 0)


def _query_steps(g: Geometry, limits: Limits, engine: str) -> list[Step]:
    return [
        QUERY_LATENT.step(
            "query_latent",
            "p1",
            {"hidden": "hidden", "q_a": "w.q_a", "q_a_norm": "w.q_a_norm", "q_latent": "q_latent"},
            hidden=g.hidden,
            q_lora=g.q_lora,
            eps=g.latent_norm_eps,
            engine=engine,
        ),
        ATTENTION_QUERY.step(
            "attention_query",
            "p1",
            {"q_latent": "q_latent", "q_b": "w.q_b", "uk": "w.uk", "query": "query"} | _rope_role(g.rope.layout),
            q_lora=g.q_lora,
            heads=g.heads // limits.ranks,
            nope=g.nope,
            rope_dims=g.rope.dims,
            kv_lora=g.kv_lora,
            rope_layout=g.rope.layout,
            engine=engine,
        ),
    ]


def _append_latent(g: Geometry, limits: Limits, formats: Formats, engine: str) -> Step:
    return APPEND_LATENT.step(
        "append_latent",
        "p1",
        {"hidden": "hidden", "kv_a": "w.kv_a", "kv_a_norm": "w.kv_a_norm", "latent_cache": "latent_cache"}
        | _rope_role(g.rope.layout),
        hidden=g.hidden,
        kv_lora=g.kv_lora,
        rope_dims=g.rope.dims,
        eps=g.latent_norm_eps,
        rope_layout=g.rope.layout,
        format=formats.latent,
        latent_scale=g.latent_scale,
        page=limits.page,
        ranks=limits.ranks,
        engine=engine,
    )


def _index_inputs(g: Geometry, limits: Limits, formats: Formats, engine: str) -> list[Step]:
    """p1 of the indexer: this rank's queries, and this chunk's records."""
    ix = g.indexer
    rope: dict[str, Any] = {"rope_dims": ix.rope_dims, "rope_layout": ix.rope_layout}
    record: dict[str, Any] = {"hadamard": ix.hadamard, "scale_format": ix.scale_format, "format": formats.index}
    return [
        INDEX_QUERY.step(
            "index_query",
            "p1",
            {
                "hidden": "hidden",
                "q_latent": "q_latent",
                "index_q": "w.index_q",
                "index_w": "w.index_w",
                "index_query": "index_query",
                "head_weights": "head_weights",
            }
            | _rope_role(ix.rope_layout),
            hidden=g.hidden,
            q_lora=g.q_lora,
            heads=ix.heads,
            dim=ix.dim,
            ranks=limits.ranks,
            engine=engine,
            **rope,
            **record,
        ),
        APPEND_INDEX.step(
            "append_index",
            "p1",
            {
                "hidden": "hidden",
                "index_k": "w.index_k",
                "index_k_norm": "w.index_k_norm",
                "index_k_norm_bias": "w.index_k_norm_bias",
                "index_cache": "index_cache",
            }
            | _rope_role(ix.rope_layout),
            hidden=g.hidden,
            dim=ix.dim,
            eps=ix.norm_eps,
            page=limits.page,
            ranks=limits.ranks,
            engine=engine,
            **rope,
            **record,
        ),
    ]


def _index_steps(g: Geometry, limits: Limits, formats: Formats, how: dict[str, Any]) -> list[Step]:
    """p2 to the barrier: everything that happens to the index history."""
    ix = g.indexer
    planes = f"{ix.dim}+4" if formats.index == "fp8" else f"{4 * ix.dim}"
    return [
        *_index_inputs(g, limits, formats, how["engine"]),
        GATHER_HISTORY.step(
            "gather_index",
            "p2",
            {"cache": "index_cache", "staging": "staging", "history": "index_history"},
            record=planes,
            page=limits.page,
            ranks=limits.ranks,
        ),
        INDEX_SELECT.step(
            "index_select",
            "p3",
            {
                "index_history": "index_history",
                "index_query": "index_query",
                "head_weights": "head_weights",
                "local_ids": "local_ids",
                "local_counts": "local_counts",
            },
            topk=ix.topk,
            heads=ix.heads,
            dim=ix.dim,
            format=formats.index,
            ranks=limits.ranks,
            **how,
        ),
        EXCHANGE_IDS.step(
            "exchange_ids",
            "p5",
            {"local_ids": "local_ids", "local_counts": "local_counts", "ids": "ids", "counts": "counts"},
            topk=ix.topk,
            ranks=limits.ranks,
        ),
        BARRIER.step("selection_barrier", "barrier", {"signals": "signals"}, scope="all", ranks=limits.ranks),
    ]


def _attend_steps(g: Geometry, limits: Limits, formats: Formats, how: dict[str, Any]) -> list[Step]:
    heads, record = g.heads // limits.ranks, latent_record_bytes(g, formats)
    gate = {"gate": "w.gate", "hidden": "hidden"} if g.output_gate else {}
    return [
        GATHER_HISTORY.step(
            "gather_latent",
            "p6",
            {"cache": "latent_cache", "staging": "staging", "history": "latent_history"},
            record=str(record),
            page=limits.page,
            ranks=limits.ranks,
        ),
        SPARSE_ATTEND.step(
            "sparse_attend",
            "p7",
            {"ids": "ids", "counts": "counts", "latent_history": "latent_history", "query": "query", "context": "context"},
            topk=g.indexer.topk,
            heads=heads,
            kv_lora=g.kv_lora,
            rope_dims=g.rope.dims,
            format=formats.latent,
            latent_scale=g.latent_scale,
            softmax_scale=g.softmax_scale,
            activation=formats.activation,
            **how,
        ),
        PROJECT_OUTPUT.step(
            "project_output",
            "p8",
            {"context": "context", "uv": "w.uv", "o": "w.o", "partial": "partial"} | gate,
            hidden=g.hidden,
            heads=heads,
            total_heads=g.heads,
            v_dim=g.v_dim,
            kv_lora=g.kv_lora,
            gate=g.output_gate,
            engine=how["engine"],
        ),
        REDUCE_OUTPUT.step(
            "reduce_output",
            "p8",
            {"partial": "partial", "staging": "staging", "output": "output"},
            hidden=g.hidden,
            ranks=limits.ranks,
        ),
    ]


def staging_bytes(g: Geometry, limits: Limits, formats: Formats) -> int:
    """Peer staging: one round of the largest collective, about ``STAGING_BYTES``, at least one page or row of every rank."""
    record = max(index_record_bytes(g, formats), latent_record_bytes(g, formats))
    page_round = limits.ranks * limits.page * record
    row_round = limits.ranks * g.hidden * 4
    whole = max(limits.ranks * limits.rank_pages * limits.page * record, limits.ranks * limits.slice_rows * g.hidden * 4)
    return align_up(max(page_round, row_round, min(whole, sizes.STAGING_BYTES)), 64)
