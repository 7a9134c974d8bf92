"""The rest of a model from its ``config.json``: vocabulary, MLPs, experts, linear attention, attention residuals.

A configuration without these fields still describes its sparse-attention layers, so their absence gives None and not an error; a
field that is there and impossible is refused like any other.
"""

from palimpsest.core.errors import BadConfig, Unsupported
from palimpsest.core.geometry import Body, Kda
from palimpsest.recipes.config import MAX_LAYERS, Fields

#: what a whole-model plan needs of every family; Kimi spells the last two ``num_experts`` and ``num_experts_per_token``
NEEDED = (
    "vocab_size", "intermediate_size", "moe_intermediate_size", "first_k_dense_replace",
    "n_routed_experts", "num_experts_per_tok",
)  # fmt: skip
#: bounds: a program has buffers per layer, never per expert, but the numbers are multiplied
MAX_EXPERTS = 1 << 16


def read_body(fields: Fields) -> Body | None:
    """The body of a DeepSeek-V3.2 or GLM-5 configuration. Raises BadConfig and Unsupported."""
    if not all(fields.has(name) for name in NEEDED):
        return None
    if fields.whole("moe_layer_freq", default=1) != 1:
        raise Unsupported(f"{fields.path('moe_layer_freq')} = {fields.data['moe_layer_freq']}: only 1 is supported")
    return _checked(
        fields,
        Body(
            vocab=fields.whole("vocab_size"),
            dense_layers=fields.whole("first_k_dense_replace", least=0, most=MAX_LAYERS),
            dense_inter=fields.whole("intermediate_size"),
            moe_inter=fields.whole("moe_intermediate_size"),
            experts=fields.whole("n_routed_experts", most=MAX_EXPERTS),
            experts_per_token=fields.whole("num_experts_per_tok", most=MAX_EXPERTS),
            shared_experts=fields.whole("n_shared_experts", least=0, most=MAX_EXPERTS, default=0),
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            next_layers=fields.whole("num_nextn_predict_layers", least=0, most=MAX_LAYERS, default=0),
        ),
    )


def read_kimi_body(text: Fields, top: Fields) -> Body | None:
    """The body of a Kimi K3 configuration; ``text`` is its text model, ``top`` the whole. Raises BadConfig and Unsupported."""
    routed = "num_experts" if text.has("num_experts") else "n_routed_experts"
    each = "num_experts_per_token" if text.has("num_experts_per_token") else "num_experts_per_tok"
    shared = "num_shared_experts" if text.has("num_shared_experts") else "n_shared_experts"
    if not all(text.has(name) for name in (*NEEDED[:4], routed, each)):
        return None
    linear = text.inner("linear_attn_config")
    kda = None
    if linear.has("num_heads") and linear.has("head_dim"):
        kernel = linear.whole("short_conv_kernel_size", most=1 << 10, default=4)
        kda = Kda(linear.whole("num_heads"), linear.whole("head_dim"), kernel)
    elif linear.has("kda_layers") and linear.data["kda_layers"]:
        return None
    latent = text.whole("routed_expert_hidden_size", default=0, least=0)
    return _checked(
        text,
        Body(
            vocab=text.whole("vocab_size"),
            dense_layers=text.whole("first_k_dense_replace", least=0, most=MAX_LAYERS),
            dense_inter=text.whole("intermediate_size"),
            moe_inter=text.whole("moe_intermediate_size"),
            experts=text.whole(routed, most=MAX_EXPERTS),
            experts_per_token=text.whole(each, most=MAX_EXPERTS),
            shared_experts=text.whole(shared, least=0, most=MAX_EXPERTS, default=0),
            expert_latent=latent,
            expert_latent_norm=bool(latent) and text.flag("latent_moe_use_norm", False),
            residual_block=text.whole("attn_res_block_size", least=0, most=MAX_LAYERS, default=0),
            kda=kda,
            expert_format=_expert_format(text if text.has("quantization_config") else top),
            tied_embeddings=text.flag("tie_word_embeddings", False),
            next_layers=text.whole("num_nextn_predict_layers", least=0, most=MAX_LAYERS, default=0),
        ),
    )


def _checked(fields: Fields, body: Body) -> Body:
    if body.experts_per_token > body.experts:
        raise BadConfig(
            f"{fields.where or 'config'}: {body.experts_per_token} experts per token, but only {body.experts} experts; "
            "the first must not exceed the second"
        )
    return body


def _expert_format(fields: Fields) -> str:
    """``mxfp4`` when compressed-tensors packs the experts so, else ``bf16``; block fp8 is in the geometry already."""
    if not fields.has("quantization_config"):
        return "bf16"
    quant = fields.inner("quantization_config")
    if quant.text("quant_method", "unnamed") != "compressed-tensors":
        return "bf16"
    packing = quant.text("format", "unnamed")
    if packing == "mxfp4-pack-quantized":
        return "mxfp4"
    raise Unsupported(f"{quant.path('format')} = {packing[:60]!r} is not supported; mxfp4-pack-quantized is")
