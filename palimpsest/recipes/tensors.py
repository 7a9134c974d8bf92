"""Every weight tensor of a whole model: its name, its shape, and which part of it one rank holds.

One table serves the plan (bytes by dtype) and the headers of a real checkpoint (``headers``), so both cut the same way:

* attention and KDA weights by heads; latent projections, the whole indexer and every norm are replicated
* dense, shared and routed MLPs by intermediate size, so every rank runs every expert on its columns (no expert parallelism)
* the latent projections around K3's routed experts are replicated: the norm between them needs whole rows
* embedding and head by vocabulary

A size that does not divide is cut into the largest share, ``ceil(units / ranks)`` units; every rank is counted with that share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from palimpsest.core.errors import Unsupported
from palimpsest.core.geometry import Body, Geometry
from palimpsest.core.units import ceil_div
from palimpsest.recipes.weights import ATTENTION_NAMES, INDEX_NAMES, tensor_shapes

#: linear weights, which fp8 checkpoints store in blocks; routed experts, which MXFP4 ones pack; all others keep their dtype
LINEAR, EXPERT, PLAIN, FP32 = "linear", "expert", "plain", "fp32"


@dataclass(frozen=True)
class Weight:
    """One tensor, or one per expert.

    role:   buffer name behind ``w.``
    tensor: name in the checkpoint behind ``<prefix>layers.<N>.`` (or ``<prefix>``); ``*`` stands for the expert number
    split:  axis that is cut over the ranks, None when replicated
    unit:   elements along ``split`` that stay together, such as the rows of one head
    form:   ``linear``, ``expert``, ``plain`` (dtype of the unquantised weights) or ``fp32``
    stored: elements of ``split`` in the checkpoint when it pads them; the rest is not used
    """

    role: str
    tensor: str
    shape: tuple[int, ...]
    split: int | None = None
    unit: int = 1
    form: str = PLAIN
    copies: int = 1
    stored: int = 0

    def share(self, ranks: int) -> int:
        """Elements one rank holds along ``split``."""
        assert self.split is not None
        return ceil_div(self.shape[self.split] // self.unit, ranks) * self.unit

    def local(self, ranks: int) -> tuple[int, ...]:
        """Shape of one rank's part of one copy."""
        if self.split is None:
            return self.shape
        return (*self.shape[: self.split], self.share(ranks), *self.shape[self.split + 1 :])

    def blocks(self, ranks: int, axis: int, block: int) -> int:
        """Blocks of ``block`` elements that one rank's part touches along ``axis``: the largest over the ranks."""
        size = self.shape[axis]
        if axis != self.split:
            return ceil_div(size, block)
        share = self.share(ranks)
        parts = [(min(r * share, size), min((r + 1) * share, size)) for r in range(ranks)]
        return max(ceil_div(stop, block) - start // block for start, stop in parts if stop > start)


def body_of(geometry: Geometry) -> Body:
    """The body of a geometry that has one. Raises Unsupported."""
    if geometry.body is None:
        raise Unsupported(
            f"the configuration of {geometry.name} describes its sparse-attention layers only; a whole-model plan also needs "
            "vocab_size, intermediate_size, moe_intermediate_size, the numbers of experts and first_k_dense_replace "
            "(and linear_attn_config.num_heads and head_dim)"
        )
    return geometry.body


def layer_weights(geometry: Geometry, layer: int) -> tuple[Weight, ...]:
    """Tensors of 0-based ``layer``. Raises Unsupported for a geometry without a body."""
    body = body_of(geometry)
    linear, dense = geometry.schedule[layer] == "linear", layer < body.dense_layers
    return (
        *_norms(geometry, body),
        *(_kda(geometry, body) if linear else _attention(geometry, layer)),
        *(_mlp("", "mlp.", geometry.hidden, body.dense_inter) if dense else _moe(geometry, body)),
    )


def outer_weights(geometry: Geometry) -> tuple[Weight, ...]:
    """Tensors outside the layers."""
    g, body = geometry, body_of(geometry)
    found = [
        Weight("embedding", "embed_tokens.weight", (body.vocab, g.hidden), 0),
        Weight("final_norm", "norm.weight", (g.hidden,)),
    ]
    if not body.tied_embeddings:
        found.append(Weight("head", "lm_head.weight", (body.vocab, g.hidden), 0))
    return (*found, *(_mix("output_mix", "output_attn_res", g.hidden) if body.residual_block else ()))


def parameters(weights: Sequence[Weight]) -> int:
    """Elements of all tensors together, in all copies."""
    total = 0
    for weight in weights:
        count = weight.copies
        for size in weight.shape:
            count *= size
        total += count
    return total


def model_parameters(geometry: Geometry) -> int:
    """Parameters of the language model, indexers included, next-token-prediction layers not."""
    inside = sum(parameters(layer_weights(geometry, layer)) for layer in range(geometry.layers))
    return inside + parameters(outer_weights(geometry))


def _mix(role: str, tensor: str, hidden: int) -> tuple[Weight, ...]:
    return (
        Weight(f"{role}_norm", f"{tensor}_norm.weight", (hidden,)),
        Weight(f"{role}_proj", f"{tensor}_proj.weight", (1, hidden)),
    )


def _norms(g: Geometry, body: Body) -> list[Weight]:
    found = [
        Weight("input_norm", "input_layernorm.weight", (g.hidden,)),
        Weight("post_norm", "post_attention_layernorm.weight", (g.hidden,)),
    ]
    if body.residual_block:
        found += [*_mix("attention_mix", "self_attention_res", g.hidden), *_mix("mlp_mix", "mlp_res", g.hidden)]
    return found


def _attention(g: Geometry, layer: int) -> list[Weight]:
    """The sparse-attention tensors; ``kv_b`` is one tensor here and two buffers (uk, uv) in the program."""
    names = ATTENTION_NAMES | (INDEX_NAMES if g.schedule[layer] == "full" else {})
    if g.output_gate:
        names = names | {"gate": "g_proj.weight"}
    shapes = tensor_shapes(g, names)
    split = {"q_b": (0, g.nope + g.rope.dims), "uk": (0, g.nope + g.v_dim), "o": (1, g.v_dim), "gate": (0, g.v_dim)}
    plain = ("q_a_norm", "kv_a_norm", "index_k_norm", "index_k_norm_bias", "index_w")
    found = []
    for buffer, suffix in names.items():
        if buffer == "uv":
            continue
        axis, unit = split.get(buffer, (None, 1))
        role = "kv_b" if buffer == "uk" else buffer
        form = PLAIN if buffer in plain else LINEAR
        found.append(Weight(role, f"self_attn.{suffix}", shapes[suffix], axis, unit, form))
    return found


def _kda(g: Geometry, body: Body) -> list[Weight]:
    kda = body.kda
    if kda is None:
        raise Unsupported(f"{g.name} has linear layers, but its configuration gives no heads and head size for them")
    width, at = kda.heads * kda.dim, "self_attn."
    by_head = {"kda_q": "q_proj", "kda_k": "k_proj", "kda_v": "v_proj", "kda_gate": "g_proj"}
    found = [Weight(role, f"{at}{name}.weight", (width, g.hidden), 0, kda.dim, LINEAR) for role, name in by_head.items()]
    found += [
        Weight(f"kda_{name}_conv", f"{at}{name}_conv1d.weight", (width, 1, kda.conv_kernel), 0, kda.dim, FP32) for name in "qkv"
    ]
    return [
        *found,
        Weight("kda_f_a", f"{at}f_a_proj.weight", (kda.dim, g.hidden), form=LINEAR),
        Weight("kda_f_b", f"{at}f_b_proj.weight", (width, kda.dim), 0, kda.dim, LINEAR),
        Weight("kda_b", f"{at}b_proj.weight", (kda.heads, g.hidden), 0, 1, LINEAR),
        # K3 pads A_log to 128 entries and uses the first ``heads``
        Weight("kda_a_log", f"{at}A_log", (kda.heads,), 0, 1, FP32, stored=max(128, kda.heads)),
        Weight("kda_dt_bias", f"{at}dt_bias", (width,), 0, kda.dim, FP32),
        Weight("kda_o_norm", f"{at}o_norm.weight", (kda.dim,), form=FP32),
        Weight("kda_o", f"{at}o_proj.weight", (g.hidden, width), 1, kda.dim, LINEAR),
    ]


def _mlp(role: str, tensor: str, width: int, inter: int) -> list[Weight]:
    return [
        Weight(f"{role}gate_proj", f"{tensor}gate_proj.weight", (inter, width), 0, form=LINEAR),
        Weight(f"{role}up_proj", f"{tensor}up_proj.weight", (inter, width), 0, form=LINEAR),
        Weight(f"{role}down_proj", f"{tensor}down_proj.weight", (width, inter), 1, form=LINEAR),
    ]


def _moe(g: Geometry, body: Body) -> list[Weight]:
    kimi = g.family == "kimi_k31"
    at, names = ("block_sparse_moe.", ("w1", "w3", "w2")) if kimi else ("mlp.", ("gate_proj", "up_proj", "down_proj"))
    width, inter, latent = body.expert_latent or g.hidden, body.moe_inter, body.expert_latent
    found = [
        Weight("router", f"{at}gate.weight", (body.experts, g.hidden)),
        Weight("router_bias", f"{at}gate.e_score_correction_bias", (body.experts,), form=FP32),
    ]
    if latent:
        found += [
            Weight("latent_down", f"{at}routed_expert_down_proj.weight", (latent, g.hidden), form=LINEAR),
            Weight("latent_up", f"{at}routed_expert_up_proj.weight", (g.hidden, latent), form=LINEAR),
        ]
    if body.expert_latent_norm:
        found.append(Weight("latent_norm", f"{at}routed_expert_norm.weight", (latent,)))
    for role, name, shape, axis in zip(
        ("gate", "up", "down"), names, ((inter, width), (inter, width), (width, inter)), (0, 0, 1), strict=True
    ):
        found.append(Weight(f"experts_{role}", f"{at}experts.*.{name}.weight", shape, axis, 1, EXPERT, body.experts))
    if body.shared_experts:
        found += _mlp("shared_", f"{at}shared_experts.", g.hidden, body.shared_experts * inter)
    return found
