"""A DFlash or DFlash2 drafter composed with its target: what it keeps, what it needs while drafting, all of it deferred.

A drafter has no embedding and head of its own: it uses the target's. It reads hidden rows tapped after some target layers, keeps
keys of the accepted context per layer (all of it, or a window), and drafts one block at a time for one request. Its heads and
MLPs are cut over the ranks like the target's; its caches and codebooks are replicated. Weights are in the unquantised dtype.

Public shape of the K3 drafter: https://huggingface.co/lightseekorg/kimi-k3-dflash2 (five latent-attention layers, four with a
window of 4096). For others the same shape at the target's hidden size is an assumption, and so is all of ``dflash``'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palimpsest.core.errors import BadConfig, UnknownName, Unsupported
from palimpsest.core.geometry import Geometry
from palimpsest.core.spec import Buffer, Plane
from palimpsest.core.units import align_up, ceil_div, dtype_bytes
from palimpsest.kernels.reduce_output.contract import CONTRACT as REDUCE_OUTPUT
from palimpsest.recipes import draft_ops, ops
from palimpsest.recipes.config import Fields
from palimpsest.recipes.sheet import Sheet, weight_formula

KINDS = ("dflash", "dflash2")


@dataclass(frozen=True)
class Drafter:
    """The numbers of one drafter.

    taps:      0-based target layers whose completed output it reads, ascending
    windows:   per layer, context tokens its cache keeps; 0 means all
    block:     tokens drafted at once, the anchor included
    kv_lora:   0 for grouped-query attention with ``kv_heads`` heads of ``v_dim``, else latent attention
    selector_top_k, selector_rank, conv_kernel, conv_group: DFlash2's candidate selector and convolution; 0 without them
    """

    name: str
    hidden: int
    inter: int
    heads: int
    nope: int
    rope: int
    v_dim: int
    taps: tuple[int, ...]
    windows: tuple[int, ...]
    block: int
    q_lora: int = 0
    kv_lora: int = 0
    kv_heads: int = 0
    selector_top_k: int = 0
    selector_rank: int = 0
    conv_kernel: int = 0
    conv_group: int = 0

    @property
    def record(self) -> int:
        """Elements one context token leaves in one layer's cache."""
        return self.kv_lora + self.rope if self.kv_lora else 2 * self.kv_heads * self.v_dim


def drafter_named(geometry: Geometry, kind: str) -> Drafter:
    """The usual drafter of a kind for a target. Raises UnknownName."""
    if kind not in KINDS:
        raise UnknownName("drafter", kind, KINDS)
    last = geometry.layers
    even = tuple(1 + i * (last - 4) // 4 for i in range(5)) if last >= 9 else tuple(range(min(last, 5)))
    shape: dict[str, Any] = {"hidden": geometry.hidden, "inter": 2 * geometry.hidden, "heads": 64, "v_dim": 128}
    if kind == "dflash":
        return Drafter("dflash", nope=128, rope=0, taps=even, windows=(0,) * 5, block=16, kv_heads=8, **shape)
    taps = (19, 37, 66, 78, 90) if geometry.family == "kimi_k31" and last == 93 else even
    return Drafter(
        "dflash2", nope=128, rope=64, taps=taps, windows=(4096,) * 4 + (0,), block=8, q_lora=1536, kv_lora=512,
        selector_top_k=16, selector_rank=256, conv_kernel=2, conv_group=16, **shape,
    )  # fmt: skip


def drafter_from_config(config: Mapping[str, Any], geometry: Geometry) -> Drafter:
    """The drafter a draft model's ``config.json`` describes. Raises BadConfig, and Unsupported for another kind of model."""
    fields = Fields(config, "draft config")
    named = fields.listed("architectures", str)
    second = any(name.startswith("DFlash2") for name in named)
    if not second and not any(name.startswith("DFlash") for name in named):
        raise Unsupported(f"draft architecture {named} is not supported; DFlashDraftModel and DFlash2DraftModel are")
    inner = fields.inner("dflash_config")
    layers = fields.whole("num_hidden_layers", most=256)
    latent = inner.text("attention_mode", "gqa") == "mla"
    kinds = fields.listed("layer_types", str) if fields.has("layer_types") else ["full_attention"] * layers
    window = fields.whole("sliding_window", default=4096)
    found = Drafter(
        name="dflash2" if second else "dflash",
        hidden=fields.whole("hidden_size"),
        inter=fields.whole("intermediate_size"),
        heads=fields.whole("num_attention_heads"),
        nope=fields.whole("qk_nope_head_dim") if latent else fields.whole("head_dim"),
        rope=fields.whole("qk_rope_head_dim") if latent else 0,
        v_dim=fields.whole("v_head_dim") if latent else fields.whole("head_dim"),
        taps=tuple(sorted(inner.listed("target_layer_ids", int, most=draft_ops.MAX_TAPS))),
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        block=inner.whole("block_size", most=1 << 12, default=fields.whole("block_size", most=1 << 12, default=16)),
        q_lora=fields.whole("q_lora_rank") if latent else 0,
        kv_lora=fields.whole("kv_lora_rank") if latent else 0,
        kv_heads=0 if latent else fields.whole("num_key_value_heads"),
        selector_top_k=inner.whole("selector_top_k") if second else 0,
        selector_rank=inner.whole("selector_rank") if second else 0,
        conv_kernel=inner.whole("conv_kernel_size", most=1 << 10) if second else 0,
        conv_group=inner.whole("conv_group_size") if second else 0,
    )
    _check(found, geometry, layers)
    return found


def _check(d: Drafter, geometry: Geometry, layers: int) -> None:
    if d.hidden != geometry.hidden:
        raise BadConfig(
            f"the drafter's hidden_size {d.hidden} is not the target's {geometry.hidden}; it drafts for another model"
        )
    if len(d.windows) != layers:
        raise BadConfig(f"layer_types has {len(d.windows)} entries but num_hidden_layers = {layers}; there must be one per layer")
    if not d.taps or d.taps[0] < 0 or d.taps[-1] >= geometry.layers or len(set(d.taps)) < len(d.taps):
        raise BadConfig(f"target_layer_ids {list(d.taps)} must name different layers of 0..{geometry.layers - 1}")
    if d.block < 2:
        raise BadConfig(f"block_size {d.block} drafts nothing; it must be at least 2")


def declare_drafter(sheet: Sheet, d: Drafter, head: str) -> tuple[str, ...]:
    """Everything after the target's logits; the taps are there already. Returns the drafter's outputs."""
    if d.hidden != sheet.geometry.hidden:
        raise BadConfig(f"the drafter's hidden size {d.hidden} is not the target's {sheet.geometry.hidden}")
    sheet.at = "drafter."
    _outer_weights(sheet, d)
    context = sheet.rows("context", d.hidden)
    taps = {f"tap{i:02d}": f"drafter.tap{i:02d}" for i in range(len(d.taps))}
    roles = taps | {"fc": sheet.w("fc"), "norm": sheet.w("context_norm"), "context": context}
    sheet.step(draft_ops.DRAFT_CONTEXT, "context", "draft", roles, hidden=d.hidden, taps=len(d.taps))
    caches = [_keys(sheet, d, layer, context) for layer in range(len(d.windows))]
    hidden = _block(sheet, d)
    for layer, cache in enumerate(caches):
        _layer(sheet, d, layer, (hidden, cache))
    outputs = _choose(sheet, d, hidden, head)
    sheet.at = ""
    return outputs


def _weight(sheet: Sheet, name: str, *shape: int) -> str:
    planes = (Plane(name.rsplit(".", maxsplit=1)[-1], sheet.formats.weights, shape, ("fixed",) * len(shape)),)
    full = f"{sheet.at}{name}"
    sheet.buffers.append(Buffer(full, "weights", planes, weight_formula(planes)))
    return full


def _outer_weights(sheet: Sheet, d: Drafter) -> None:
    _weight(sheet, "w.fc", d.hidden, len(d.taps) * d.hidden)
    for name in ("context_norm", "final_norm"):
        _weight(sheet, f"w.{name}", d.hidden)
    if d.selector_rank:
        _weight(sheet, "w.selector", d.selector_rank, d.hidden)
        for name in ("predecessors", "successors"):
            _weight(sheet, f"w.{name}", sheet.body.vocab, d.selector_rank)


def _keys(sheet: Sheet, d: Drafter, layer: int, context: str) -> str:
    """One layer's cache and the records of this chunk's context; heads of keys and values are replicated."""
    kept = align_up(min(d.windows[layer] or sheet.limits.tokens, sheet.limits.tokens), sheet.limits.page)
    size = dtype_bytes(sheet.act)
    at = f"layer{layer:02d}."
    axis, word = ("fixed:window", "window") if 0 < d.windows[layer] < sheet.limits.tokens else ("tokens", "tokens")
    shape = {axis: kept, "fixed": d.record}
    cache = sheet.buffer(f"{at}cache", sheet.act, shape, f"{word} x {d.record} x {size}", "persistent")
    records = sheet.rows(f"{at}records", d.record)
    weight = _weight(sheet, f"{at}w.keys", d.record, d.hidden)
    norm = _weight(sheet, f"{at}w.keys_norm", d.kv_lora or d.v_dim)
    roles = {"context": context, "weight": weight, "norm": norm, "records": records, "cache": cache}
    sheet.step(draft_ops.DRAFT_KEYS, f"{at}keys", "draft", roles, hidden=d.hidden, record=d.record, window=kept)
    return cache


def _block(sheet: Sheet, d: Drafter) -> str:
    """The block's token ids and their embedded rows."""
    block = sheet.buffer("block", "i32", {"fixed": d.block}, f"{d.block} x 4")
    sheet.step(draft_ops.DRAFT_ANCHOR, "anchor", "draft", {"logits": "logits", "block": block}, block=d.block, mask=0)
    hidden = _small(sheet, "hidden", sheet.act, d.block, d.hidden)
    roles = {"tokens": block, "embedding": "w.embedding", "staging": "staging", "output": hidden}
    sheet.step(ops.EMBED_ROWS, "embed_rows", "draft", roles, hidden=d.hidden, ranks=sheet.limits.ranks)
    return hidden


def _small(sheet: Sheet, name: str, dtype: str, *shape: int) -> str:
    axes = {f"fixed:{i}": size for i, size in enumerate(shape)}
    return sheet.buffer(name, dtype, axes, " x ".join(map(str, (*shape, dtype_bytes(dtype)))))


def _layer(sheet: Sheet, d: Drafter, layer: int, through: tuple[str, str]) -> None:
    at, (hidden, cache) = f"layer{layer:02d}.", through
    heads, ranks = ceil_div(d.heads, sheet.limits.ranks), sheet.limits.ranks
    key = d.kv_lora + d.rope if d.kv_lora else d.v_dim
    value = d.kv_lora or d.v_dim
    roles = (
        {"hidden": hidden, "cache": cache}
        | _attention_weights(sheet, d, at, heads)
        | _convolution(sheet, d, at, "attention", hidden)
    )
    made = {
        "query": _small(sheet, f"{at}query", sheet.act, d.block, heads, key),
        "context": _small(sheet, f"{at}context", "fp32", d.block, heads, value),
        "partial": _small(sheet, f"{at}partial", "fp32", d.block, d.hidden),
    }
    kept = d.windows[layer] or sheet.limits.tokens
    sheet.step(
        draft_ops.DRAFT_ATTEND, f"{at}attend", "draft", roles | made,
        hidden=d.hidden, heads=heads, key_dims=key, value_dims=value, window=kept,
    )  # fmt: skip
    _add(sheet, d, f"{at}attention", hidden, made["partial"])
    width = ceil_div(d.inter, ranks)
    normed = _small(sheet, f"{at}mlp_input", sheet.act, d.block, d.hidden)
    weight = _weight(sheet, f"{at}w.post_norm", d.hidden)
    sheet.step(
        ops.RMS_NORM, f"{at}post_norm", "draft", {"input": hidden, "weight": weight, "output": normed}, hidden=d.hidden, rows=0
    )
    _convolution(sheet, d, at, "mlp", normed)
    inner = _small(sheet, f"{at}mlp_hidden", sheet.act, d.block, width)
    gate, up = (_weight(sheet, f"{at}w.{name}_proj", width, d.hidden) for name in ("gate", "up"))
    roles = {"input": normed, "gate": gate, "up": up, "hidden": inner}
    sheet.step(ops.MLP_UP, f"{at}mlp_up", "draft", roles, hidden=d.hidden, inter=width)
    partial = _small(sheet, f"{at}mlp_partial", "fp32", d.block, d.hidden)
    roles = {"hidden": inner, "down": _weight(sheet, f"{at}w.down_proj", d.hidden, width), "partial": partial}
    sheet.step(ops.MLP_DOWN, f"{at}mlp_down", "draft", roles, hidden=d.hidden, inter=width)
    _add(sheet, d, f"{at}mlp", hidden, partial)


def _attention_weights(sheet: Sheet, d: Drafter, at: str, heads: int) -> dict[str, str]:
    shapes: dict[str, tuple[int, ...]] = {"norm": (d.hidden,), "o": (d.hidden, heads * d.v_dim)}
    if d.kv_lora:
        shapes |= {
            "q_a": (d.q_lora, d.hidden),
            "q_norm": (d.q_lora,),
            "q_b": (heads * (d.nope + d.rope), d.q_lora),
            "kv_b": (heads * (d.nope + d.v_dim), d.kv_lora),
        }
    else:
        shapes |= {"q_b": (heads * d.v_dim, d.hidden), "q_norm": (d.v_dim,)}
    found = {role: _weight(sheet, f"{at}w.{role}", *shape) for role, shape in shapes.items()}
    return found | {"kv": f"{sheet.at}{at}w.keys", "kv_norm": f"{sheet.at}{at}w.keys_norm"}


def _convolution(sheet: Sheet, d: Drafter, at: str, where: str, hidden: str) -> dict[str, str]:
    """DFlash2's coefficients around one sublayer; nothing for DFlash."""
    if not d.conv_kernel:
        return {}
    groups = ceil_div(d.hidden, d.conv_group)
    base = _weight(sheet, f"{at}w.{where}_conv", 2, d.conv_kernel, d.hidden)
    projection = _weight(sheet, f"{at}w.{where}_conv_proj", 2 * d.conv_kernel * groups, d.hidden)
    delta = _small(sheet, f"{at}{where}_delta", "fp32", d.block, 2, d.conv_kernel, groups)
    roles = {"hidden": hidden, "base": base, "projection": projection, "delta": delta}
    sheet.step(draft_ops.DRAFT_CONV, f"{at}{where}_conv", "draft", roles, hidden=d.hidden, taps=d.conv_kernel, groups=groups)
    return {"delta": delta}


def _add(sheet: Sheet, d: Drafter, name: str, hidden: str, partial: str) -> None:
    output = _small(sheet, f"{name}_output", sheet.act, d.block, d.hidden)
    roles = {"partial": partial, "staging": "staging", "output": output}
    sheet.step(REDUCE_OUTPUT, f"{name}_reduce", "draft", roles, hidden=d.hidden, ranks=sheet.limits.ranks)
    sheet.step(ops.ADD_RESIDUAL, f"{name}_add", "draft", {"state": hidden, "output": output}, hidden=d.hidden)


def _choose(sheet: Sheet, d: Drafter, hidden: str, head: str) -> tuple[str, ...]:
    """Logits of the drafted slots by the target's head, candidates, and the chosen tokens."""
    slots, vocab, ranks = d.block - 1, sheet.body.vocab, sheet.limits.ranks
    normed = _small(sheet, "normed", sheet.act, d.block, d.hidden)
    roles = {"input": hidden, "weight": sheet.w("final_norm"), "output": normed}
    sheet.step(ops.RMS_NORM, "final_norm", "draft", roles, hidden=d.hidden, rows=0)
    part = _small(sheet, "logits_part", "fp32", slots, ceil_div(vocab, ranks))
    logits = _small(sheet, "logits", "fp32", slots, vocab)
    roles = {"input": normed, "head": head, "part": part}
    sheet.step(ops.LAST_LOGITS, "slot_logits", "draft", roles, hidden=d.hidden, vocab=ceil_div(vocab, ranks))
    sheet.step(
        ops.GATHER_LOGITS,
        "gather_logits",
        "draft",
        {"part": part, "staging": "staging", "logits": logits},
        vocab=vocab,
        ranks=ranks,
    )
    tokens = _small(sheet, "tokens", "i32", slots)
    picked = {"logits": logits, "tokens": tokens}
    if d.selector_top_k:
        k = d.selector_top_k
        unary, candidates = _small(sheet, "unary", "fp32", slots, k), _small(sheet, "candidates", "i64", slots, k)
        lattice = _small(sheet, "lattice", "fp32", slots, k, k)
        roles = {"logits": logits, "unary": unary, "candidates": candidates}
        sheet.step(draft_ops.DRAFT_CANDIDATES, "candidates", "draft", roles, slots=slots, k=k)
        roles = {
            "hidden": normed,
            "unary": unary,
            "candidates": candidates,
            "lattice": lattice,
            "projection": sheet.w("selector"),
        }
        books = {name: sheet.w(name) for name in ("predecessors", "successors")}
        sheet.step(
            draft_ops.DRAFT_LATTICE, "lattice", "draft", roles | books, hidden=d.hidden, rank=d.selector_rank, slots=slots, k=k
        )
        picked |= {"lattice": lattice, "candidates": candidates}
    sheet.step(draft_ops.DRAFT_PICK, "pick", "draft", picked, slots=slots)
    return (logits, tokens)
