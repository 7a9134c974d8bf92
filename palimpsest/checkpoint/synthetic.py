"""What the generated checkpoints look like: each preset's shape, config.json and tensors, spelled as the real families are.

Kimi K3's names, shapes and dtypes follow its public safetensors index (attention, KDA, latent MoE, attention residuals), and
``self_attn.indexer.{wq_b,wk,weights_proj,k_norm}`` follows vLLM's page on K3.1. Guesses, because K3.1's own files are not public:
that ``dsa_config`` lies in ``text_config`` with ``index_n_heads``, ``index_head_dim`` and ``index_topk``, and that the indexer's
tensors are bf16. Simplified on purpose: routed experts are bf16 (``w1``, ``w2``, ``w3``) where K3 stores MXFP4, and there is no
vision tower.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The numbers of one synthetic model. ``schedule`` has one letter a layer: F full, S shared, L linear attention."""

    family: str
    schedule: str
    hidden: int = 256
    heads: int = 8
    q_lora: int = 128
    kv_lora: int = 512
    nope: int = 32
    rope: int = 64
    v: int = 32
    index_heads: int = 32
    index_dim: int = 128
    topk: int = 64
    vocab: int = 512
    inter: int = 384
    experts: int = 4
    experts_per_token: int = 2
    moe_inter: int = 128
    moe_latent: int = 128
    kda_heads: int = 4
    kda_dim: int = 32
    context: int = 4096
    fp8: int = 0


#: preset -> shape. tiny-k31 runs on 16 ranks and fits the small qualification profile, wide-k31 the wide one; k31-pro-layer3 has
#: the attention of Kimi K3.1-Pro's layer 3 at its real sizes, for the full one, and little else; micro has natural score ties
PRESETS = {
    "tiny-k31": Shape("kimi_k31", "LLLFF", heads=16, index_heads=4, topk=128, context=1 << 20),
    "wide-k31": Shape("kimi_k31", "LLLF", heads=4, index_heads=4, topk=2048, context=1 << 20),
    "k31-pro-layer3": Shape("kimi_k31", "LLLF", hidden=7168, heads=96, q_lora=1536, nope=128, v=128, topk=2048, context=1 << 20),
    "tiny-dsv32": Shape("deepseek_v32", "FFF", context=163_840),
    "tiny-dsv32-fp8": Shape("deepseek_v32", "FFF", context=163_840, fp8=128),
    "tiny-glm": Shape("glm_moe_dsa", "FFSF", context=202_752),
    "micro": Shape(
        "deepseek_v32",
        "FF",
        hidden=32,
        heads=4,
        q_lora=16,
        kv_lora=16,
        nope=8,
        rope=4,
        v=8,
        index_heads=2,
        index_dim=8,
        topk=8,
        vocab=64,
        inter=48,
        moe_inter=16,
        context=163_840,
    ),
}


@dataclass(frozen=True)
class Draw:
    """How one tensor is drawn: ``mean + spread * z``, z of unit variance, stored as ``dtype`` (F8_E4M3 adds block scales)."""

    shape: tuple[int, ...]
    spread: float
    mean: float = 0.0
    dtype: str = "BF16"


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json of ``shape``."""
    return {"kimi_k31": _kimi_config, "deepseek_v32": _deepseek_config, "glm_moe_dsa": _glm_config}[shape.family](shape)


def _latent_attention(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inter,
        "moe_intermediate_size": shape.moe_inter,
        "num_hidden_layers": len(shape.schedule),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_lora,
        "kv_lora_rank": shape.kv_lora,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.v,
        "max_position_embeddings": shape.context,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc",
        "initializer_range": 0.02,
    }


def _index_config(shape: Shape) -> dict[str, int]:
    return {"index_n_heads": shape.index_heads, "index_head_dim": shape.index_dim, "index_topk": shape.topk}


def _router(shape: Shape) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.experts_per_token,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _deepseek_config(shape: Shape) -> dict[str, Any]:
    yarn = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "torch_dtype": "bfloat16",
        **_latent_attention(shape),
        **_router(shape),
        **_index_config(shape),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": yarn,
    }
    if shape.fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [shape.fp8, shape.fp8],
            "scale_fmt": "ue8m0",
        }
    return config


def _glm_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        **_latent_attention(shape),
        **_router(shape),
        **_index_config(shape),
        "qk_head_dim": shape.nope + shape.rope,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "indexer_types": [{"F": "full", "S": "shared"}[letter] for letter in shape.schedule],
    }


def _kimi_config(shape: Shape) -> dict[str, Any]:
    layers = enumerate(shape.schedule, start=1)
    full = [layer for layer, letter in layers if letter == "F"]
    text = {
        "model_type": "kimi_linear",
        **_latent_attention(shape),
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "dsa_config": _index_config(shape),
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, len(shape.schedule) + 1) if layer not in full],
            "num_heads": shape.kda_heads,
            "head_dim": shape.kda_dim,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "attn_res_block_size": 12,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "num_experts": shape.experts,
        "num_experts_per_token": shape.experts_per_token,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": shape.moe_latent,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "num_expert_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["KimiK31ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "bfloat16",
        "text_config": text,
    }


def tensors_of(shape: Shape) -> dict[str, Draw]:
    """Every tensor of the model: name -> how it is drawn. Linear weights have variance gain**2 / fan_in: scores are O(1)."""
    kimi = shape.family == "kimi_k31"
    top = "language_model." if kimi else ""
    tensors = {
        f"{top}model.embed_tokens.weight": Draw((shape.vocab, shape.hidden), 1.0),
        f"{top}model.norm.weight": _norm(shape.hidden),
        f"{top}lm_head.weight": _linear(shape.vocab, shape.hidden, 2.0),
    }
    if kimi:
        tensors |= _residual(f"{top}model.output_attn_res", shape.hidden)
    for layer, letter in enumerate(shape.schedule):
        prefix = f"{top}model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = _norm(shape.hidden)
        tensors[f"{prefix}post_attention_layernorm.weight"] = _norm(shape.hidden)
        if kimi:
            tensors |= _residual(f"{prefix}self_attention_res", shape.hidden) | _residual(f"{prefix}mlp_res", shape.hidden)
        tensors |= _kda(shape, f"{prefix}self_attn.") if letter == "L" else _attention(shape, f"{prefix}self_attn.", letter)
        if layer == 0:
            tensors |= _gated(shape, f"{prefix}mlp.", shape.hidden, shape.inter)
        else:
            tensors |= _kimi_moe(shape, f"{prefix}block_sparse_moe.") if kimi else _moe(shape, f"{prefix}mlp.")
    return tensors


def _linear(out: int, fan_in: int, gain: float = 1.0, fp8: int = 0) -> Draw:
    return Draw((out, fan_in), gain / math.sqrt(fan_in), dtype="F8_E4M3" if fp8 else "BF16")


def _norm(size: int, dtype: str = "BF16") -> Draw:
    return Draw((size,), 0.1, 1.0, dtype)


def _residual(name: str, hidden: int) -> dict[str, Draw]:
    return {f"{name}_norm.weight": _norm(hidden), f"{name}_proj.weight": _linear(1, hidden)}


def _attention(shape: Shape, prefix: str, letter: str) -> dict[str, Draw]:
    s, fp8 = shape, shape.fp8
    tensors = {
        "q_a_proj.weight": _linear(s.q_lora, s.hidden, fp8=fp8),
        "q_a_layernorm.weight": _norm(s.q_lora),
        "q_b_proj.weight": _linear(s.heads * (s.nope + s.rope), s.q_lora, 1.5, fp8),
        "kv_a_proj_with_mqa.weight": _linear(s.kv_lora + s.rope, s.hidden, fp8=fp8),
        "kv_a_layernorm.weight": _norm(s.kv_lora),
        "kv_b_proj.weight": _linear(s.heads * (s.nope + s.v), s.kv_lora, 1.5, fp8),
        "o_proj.weight": _linear(s.hidden, s.heads * s.v, 4.0, fp8),
    }
    if s.family == "kimi_k31":
        tensors["g_proj.weight"] = _linear(s.heads * s.v, s.hidden)
    if letter == "F":
        tensors |= {
            "indexer.wq_b.weight": _linear(s.index_heads * s.index_dim, s.q_lora, fp8=fp8),
            "indexer.wk.weight": _linear(s.index_dim, s.hidden, fp8=fp8),
            "indexer.k_norm.weight": _norm(s.index_dim),
            "indexer.k_norm.bias": Draw((s.index_dim,), 0.1),
            "indexer.weights_proj.weight": _linear(s.index_heads, s.hidden),
        }
    return {prefix + name: draw for name, draw in tensors.items()}


def _kda(shape: Shape, prefix: str) -> dict[str, Draw]:
    width, hidden = shape.kda_heads * shape.kda_dim, shape.hidden
    tensors = {f"{name}_proj.weight": _linear(width, hidden) for name in ("q", "k", "v", "g")}
    tensors |= {f"{name}_conv1d.weight": Draw((width, 1, 4), 0.5, dtype="F32") for name in ("q", "k", "v")}
    tensors |= {
        "f_a_proj.weight": _linear(shape.kda_dim, hidden),
        "f_b_proj.weight": _linear(width, shape.kda_dim),
        # K3 pads A_log to 128 entries and uses the first num_heads
        "A_log": Draw((max(128, shape.kda_heads),), 0.5, 1.0, "F32"),
        "dt_bias": Draw((width,), 0.5, dtype="F32"),
        "b_proj.weight": _linear(shape.kda_heads, hidden),
        "o_norm.weight": _norm(shape.kda_dim, "F32"),
        "o_proj.weight": _linear(hidden, width, 4.0),
    }
    return {prefix + name: draw for name, draw in tensors.items()}


def _gated(shape: Shape, prefix: str, width: int, inter: int) -> dict[str, Draw]:
    fp8 = shape.fp8
    return {
        f"{prefix}gate_proj.weight": _linear(inter, width, fp8=fp8),
        f"{prefix}up_proj.weight": _linear(inter, width, fp8=fp8),
        f"{prefix}down_proj.weight": _linear(width, inter, fp8=fp8),
    }


def _gate(shape: Shape, prefix: str) -> dict[str, Draw]:
    return {
        f"{prefix}gate.weight": _linear(shape.experts, shape.hidden),
        f"{prefix}gate.e_score_correction_bias": Draw((shape.experts,), 0.01, dtype="F32"),
    }


def _moe(shape: Shape, prefix: str) -> dict[str, Draw]:
    tensors = _gate(shape, prefix) | _gated(shape, f"{prefix}shared_experts.", shape.hidden, shape.moe_inter)
    for expert in range(shape.experts):
        tensors |= _gated(shape, f"{prefix}experts.{expert}.", shape.hidden, shape.moe_inter)
    return tensors


def _kimi_moe(shape: Shape, prefix: str) -> dict[str, Draw]:
    hidden, latent, inter = shape.hidden, shape.moe_latent, shape.moe_inter
    tensors = _gate(shape, prefix) | _gated(shape, f"{prefix}shared_experts.", hidden, 2 * inter)
    tensors |= {
        f"{prefix}routed_expert_down_proj.weight": _linear(latent, hidden),
        f"{prefix}routed_expert_norm.weight": _norm(latent),
        f"{prefix}routed_expert_up_proj.weight": _linear(hidden, latent),
    }
    for expert in range(shape.experts):
        for name, size in (("w1", (inter, latent)), ("w2", (latent, inter)), ("w3", (inter, latent))):
            tensors[f"{prefix}experts.{expert}.{name}.weight"] = _linear(*size)
    return tensors
