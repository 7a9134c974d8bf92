"""DeepSeek-V3.2: MLA with an indexer in every layer. Attention rotates interleaved pairs, the indexer half-split ones.

Sources: https://huggingface.co/deepseek-ai/DeepSeek-V3.2-Exp (config.json, inference/model.py) and transformers' deepseek_v32.
"""

from palimpsest.core.errors import Unsupported
from palimpsest.core.geometry import Formats, Geometry
from palimpsest.core.spec import Limits, Program
from palimpsest.recipes.blocks import layer_program
from palimpsest.recipes.body import read_body
from palimpsest.recipes.config import MAX_LAYERS, Fields, attention_sizes, read_indexer, read_quantization, refuse_set, rope_dims
from palimpsest.recipes.rope import read_rope, softmax_scale
from palimpsest.recipes.weights import sparse_names

ARCHITECTURES = ("DeepseekV32ForCausalLM",)
MODEL_TYPES = ("deepseek_v32",)
PREFIXES = ("model.",)
#: eps of both latent RMS norms and of the index key LayerNorm: module defaults in the reference
LATENT_NORM_EPS = 1e-6
INDEX_NORM_EPS = 1e-6
#: names of the one attention kind these models have, when ``layer_types`` lists it
LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")


def geometry(config: dict[str, object], name: str) -> Geometry:
    """Geometry of a DeepSeek-V3.2 ``config.json``. Raises BadConfig and Unsupported."""
    fields = Fields(config, "")
    layers = fields.whole("num_hidden_layers", most=MAX_LAYERS)
    for field in ("indexer_types", "index_topk_pattern"):
        refuse_set(fields, field, "an indexer schedule on DeepSeek-V3.2 (every layer runs its own)")
    if fields.whole("index_topk_freq", default=1) != 1:
        raise Unsupported(f"index_topk_freq = {fields.data['index_topk_freq']}: every DeepSeek-V3.2 layer runs its own indexer")
    return latent_geometry(fields, "deepseek_v32", name, index_interleaved=False, schedule=("full",) * layers)


def latent_geometry(fields: Fields, family: str, name: str, *, index_interleaved: bool, schedule: tuple[str, ...]) -> Geometry:
    """What DeepSeek-V3.2 and GLM-5 share: rotated MLA, fixed norm eps, an index RoPE over the same angles.

    index_interleaved: the index layout when the configuration carries no ``indexer_rope_interleave``
    """
    refuse_set(fields, "index_kpool", "an indexer that scores pools of keys")
    if not fields.flag("rope_interleave", True):
        raise Unsupported(
            "rope_interleave = false: attention that rotates half-split pairs is not supported; it must be absent or true"
        )
    sizes = attention_sizes(fields)
    _check_layer_types(fields, sizes["layers"])
    rope = read_rope(fields, layout="interleaved", dims=rope_dims(fields, sizes["nope"]))
    interleaved = fields.flag("indexer_rope_interleave", index_interleaved)
    blocks, scale_format = read_quantization(fields)
    indexer = read_indexer(
        fields, rope_layout="interleaved" if interleaved else "half", rope_dims=rope.dims, norm_eps=INDEX_NORM_EPS,
        scale_format=scale_format or "ue8m0",
    )  # fmt: skip
    return Geometry(
        family=family, name=name, rope=rope, softmax_scale=softmax_scale(sizes["nope"], rope), latent_norm_eps=LATENT_NORM_EPS,
        output_gate=False, indexer=indexer, schedule=schedule, block_fp8=blocks,
        latent_format="bf16" if sizes["kv_lora"] % 128 else "fp8_ds_mla", body=read_body(fields), **sizes,
    )  # fmt: skip


def tensor_names(geometry: Geometry, layer: int) -> dict[str, str]:
    """Buffer name (without ``w.``) -> tensor suffix of 0-based ``layer``."""
    return sparse_names(geometry, layer)


def program(
    geometry: Geometry, limits: Limits, formats: Formats, layer: int, *, engine: str = "portable", threads: int = 1
) -> Program:
    """The attention sublayer of ``layer``; see ``blocks.layer_program``."""
    return layer_program(geometry, limits, formats, layer, engine=engine, threads=threads)


def _check_layer_types(fields: Fields, layers: int) -> None:
    if not fields.has("layer_types"):
        return
    kinds = fields.listed("layer_types", str)
    other = [kind for kind in kinds if kind not in LAYER_TYPES]
    if other:
        raise Unsupported(f"layer_types names {other[0]!r}; supported: {', '.join(LAYER_TYPES)}")
    if len(kinds) != layers:
        raise Unsupported(f"layer_types has {len(kinds)} entries but num_hidden_layers = {layers}")
