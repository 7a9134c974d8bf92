"""Kimi K3.1-Pro: the K3 skeleton with an indexer in each full-attention layer (gated MLA without RoPE); the others are KDA.

What is public: https://github.com/ggml-org/llama.cpp/releases/tag/b12180 (indexer sizes, no RoPE, key LayerNorm eps =
rms_norm_eps, 1-based layer list) and https://docs.vllm.ai/en/latest/api/vllm/models/kimi_k3/nvidia/dsa/ (tensor names). The
spelling inside ``dsa_config`` is not public, so several are accepted and anything else is refused.
"""

import itertools

from palimpsest.core.errors import BadConfig, Unsupported
from palimpsest.core.geometry import Formats, Geometry
from palimpsest.core.spec import Limits, Program
from palimpsest.recipes.blocks import layer_program
from palimpsest.recipes.body import read_kimi_body
from palimpsest.recipes.config import Fields, attention_sizes, dsa_layers, read_indexer, read_quantization, rope_dims
from palimpsest.recipes.rope import softmax_scale, without_rope
from palimpsest.recipes.weights import sparse_names

ARCHITECTURES = ("KimiK31ForConditionalGeneration", "KimiK31ForCausalLM", "KimiK3ForConditionalGeneration")
MODEL_TYPES = ("kimi_k3", "kimi_k31")
PREFIXES = ("language_model.model.", "model.language_model.", "model.")
#: eps of the RMS norms on both latents: the reference's module default, not rms_norm_eps
LATENT_NORM_EPS = 1e-6


def geometry(config: dict[str, object], name: str) -> Geometry:
    """Geometry of a K3.1 ``config.json`` (``text_config`` nested or not). Raises BadConfig and Unsupported."""
    top = Fields(config, "")
    text = _text(top)
    if not text.flag("mla_use_nope", False):
        raise Unsupported(
            f"{text.path('mla_use_nope')} is not true: K3.1 attention has no RoPE, and a rotated variant is not supported"
        )
    for field in ("rope_scaling", "rope_parameters"):
        if text.data.get(field):
            raise Unsupported(f"{text.path(field)} is set although mla_use_nope is true; it must be absent")
    sizes = attention_sizes(text)
    rope = without_rope(rope_dims(text, sizes["nope"]))
    eps = text.number("rms_norm_eps", most=1.0)
    blocks, scale_format = read_quantization(text if text.has("quantization_config") else top)
    return Geometry(
        family="kimi_k31",
        name=name,
        rope=rope,
        softmax_scale=softmax_scale(sizes["nope"], rope),
        latent_norm_eps=LATENT_NORM_EPS,
        output_gate=text.flag("mla_use_output_gate", False),
        indexer=read_indexer(text, rope_layout="none", rope_dims=0, norm_eps=eps, scale_format=scale_format or "ue8m0"),
        schedule=_schedule(text, sizes["layers"]),
        latent_format="fp8",
        block_fp8=blocks,
        body=read_kimi_body(text, top),
        **sizes,
    )


def tensor_names(geometry: Geometry, layer: int) -> dict[str, str]:
    """Buffer name (without ``w.``) -> tensor suffix of 0-based ``layer``; the output gate is ``g_proj``."""
    return sparse_names(geometry, layer) | ({"gate": "g_proj.weight"} if geometry.output_gate else {})


def program(
    geometry: Geometry, limits: Limits, formats: Formats, layer: int, *, engine: str = "portable", threads: int = 1
) -> Program:
    """The attention sublayer of ``layer``; see ``blocks.layer_program``."""
    return layer_program(geometry, limits, formats, layer, engine=engine, threads=threads)


def _text(top: Fields) -> Fields:
    """The text model's fields; an indexer described beside ``text_config`` counts as if it were inside."""
    if not top.has("text_config"):
        return top
    text = top.inner("text_config")
    outside = {key: top.data[key] for key in ("dsa_config", "index_n_heads", "index_head_dim", "index_topk") if top.has(key)}
    for key, value in outside.items():
        if text.has(key) and text.data[key] != value:
            raise BadConfig(f"{key} and {text.path(key)} disagree; keep one of them")
    return Fields({**text.data, **outside}, text.where)


def _schedule(text: Fields, layers: int) -> tuple[str, ...]:
    """Per 0-based layer ``full`` or ``linear``, from the 1-based lists, which must cover the layers exactly once."""
    linear = text.inner("linear_attn_config")
    full, kda = linear.listed("full_attn_layers", int), linear.listed("kda_layers", int)
    both = sorted(full + kda)
    if both != list(range(1, layers + 1)):
        raise BadConfig(
            f"{linear.where} must name each of the layers 1..{layers} once (1-based): {_difference(both, layers)}; "
            f"full_attn_layers = {_short(full)}, kda_layers = {_short(kda)}"
        )
    if not full:
        raise Unsupported(f"{linear.path('full_attn_layers')} is empty: no layer would attend sparsely")
    listed = dsa_layers(text)
    if listed is not None and sorted(listed) != sorted(full):
        raise BadConfig(
            f"the layer list in {text.path('dsa_config')} must be exactly the full-attention layers (1-based): "
            f"it is {_short(listed)}, {linear.path('full_attn_layers')} is {_short(full)}"
        )
    sparse = set(full)
    return tuple("full" if i + 1 in sparse else "linear" for i in range(layers))


def _difference(both: list[int], layers: int) -> str:
    wrong = {
        "outside": sorted({n for n in both if not 1 <= n <= layers}),
        "missing": sorted(set(range(1, layers + 1)) - set(both)),
        "named twice": sorted({a for a, b in itertools.pairwise(both) if a == b}),
    }
    return ", ".join(f"{what} {_short(numbers)}" for what, numbers in wrong.items() if numbers)


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 32 else f"[{', '.join(map(str, numbers[:30]))}, ... {len(numbers)} in all]"
