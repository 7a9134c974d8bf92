"""GLM-5, 5.1 and 5.2: DeepSeek's latent attention with an interleaved index RoPE and, in 5.2, indexers shared between layers.

A ``shared`` layer has no indexer, no index cache and no index history: it keeps the ids of the full layer before it.
Sources: https://huggingface.co/zai-org/GLM-5 (config.json) and transformers' glm_moe_dsa; the sharing rule is arXiv 2603.12201.
"""

from palimpsest.core.errors import BadConfig
from palimpsest.core.geometry import Formats, Geometry
from palimpsest.core.spec import Limits, Program
from palimpsest.recipes.blocks import layer_program
from palimpsest.recipes.config import MAX_LAYERS, Fields
from palimpsest.recipes.deepseek_v32 import latent_geometry
from palimpsest.recipes.weights import sparse_names

ARCHITECTURES = ("GlmMoeDsaForCausalLM",)
MODEL_TYPES = ("glm_moe_dsa",)
PREFIXES = ("model.",)
_LETTERS = {"F": "full", "S": "shared"}


def geometry(config: dict[str, object], name: str) -> Geometry:
    """Geometry of a GLM-5.x ``config.json``. Raises BadConfig and Unsupported."""
    fields = Fields(config, "")
    layers = fields.whole("num_hidden_layers", most=MAX_LAYERS)
    return latent_geometry(fields, "glm_dsa", name, index_interleaved=True, schedule=_schedule(fields, layers))


def tensor_names(geometry: Geometry, layer: int) -> dict[str, str]:
    """Buffer name (without ``w.``) -> tensor suffix of 0-based ``layer``."""
    return sparse_names(geometry, layer)


def program(
    geometry: Geometry, limits: Limits, formats: Formats, layer: int, *, engine: str = "portable", threads: int = 1
) -> Program:
    """The attention sublayer of ``layer``; see ``blocks.layer_program``."""
    return layer_program(geometry, limits, formats, layer, engine=engine, threads=threads)


def _schedule(fields: Fields, layers: int) -> tuple[str, ...]:
    """Per layer ``full`` or ``shared``: the list, else the pattern, else the frequency rule, as transformers ranks them."""
    if fields.has("indexer_types"):
        source, kinds = "indexer_types", fields.listed("indexer_types", str)
    elif fields.has("index_topk_pattern"):
        source, kinds = "index_topk_pattern", _pattern(fields)
    else:
        source = "index_topk_freq"
        every = fields.whole("index_topk_freq", least=0, default=1)
        skip = fields.whole("index_skip_topk_offset", least=0, default=2)
        kinds = ["shared" if max(i - skip + 1, 0) % max(every, 1) else "full" for i in range(layers)]
    unknown = [kind for kind in kinds if kind not in ("full", "shared")]
    if unknown:
        raise BadConfig(f"{source} names {unknown[0]!r}; a layer's indexer is full or shared (F or S in a pattern)")
    if len(kinds) != layers:
        raise BadConfig(f"{source} has {len(kinds)} entries but num_hidden_layers = {layers}; there must be one per layer")
    if kinds[0] != "full":
        raise BadConfig(f"{source} makes layer 0 shared, but no layer before it selects; the first layer must be full")
    return tuple(kinds)


def _pattern(fields: Fields) -> list[str]:
    if isinstance(fields.data["index_topk_pattern"], str):
        letters = fields.text("index_topk_pattern")
        if len(letters) > MAX_LAYERS:
            raise BadConfig(f"index_topk_pattern has {len(letters)} letters; at most {MAX_LAYERS} are supported")
        return [_LETTERS.get(letter, letter) for letter in letters]
    return [_LETTERS.get(kind, kind) for kind in fields.listed("index_topk_pattern", str)]
