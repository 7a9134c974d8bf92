"""Geometry: the numbers of one model's sparse-attention layers, read from a ``config.json`` by a recipe.

A Geometry is frozen, has a canonical text, and says nothing about rows, tokens or ranks: those are Limits.
"""

import dataclasses
from dataclasses import dataclass

from palimpsest.core.errors import Unsupported

#: record formats of the index cache: bytes per token are ``dim + 4`` and ``4 * dim``
INDEX_FORMATS = ("fp8", "fp32")
#: record formats of the latent cache; for 512 + 64 dims: 576, 656, 1152 and 2304 bytes per token
LATENT_FORMATS = ("fp8", "fp8_ds_mla", "bf16", "fp32")
#: RoPE layouts: pairs (i, i + n/2), pairs (2i, 2i + 1), or no rotation at all
ROPE_LAYOUTS = ("half", "interleaved", "none")
#: how the fp8 index scale is formed: amax/448, or that rounded up to a power of two (both stored as fp32)
SCALE_FORMATS = ("ue8m0", "fp32")


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (arXiv 2309.00071), as DeepSeek's configs spell it."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the attention query and key: ``dims`` trailing dims, position times ``theta**(-2i/dims)``."""

    layout: str
    dims: int
    theta: float = 10000.0
    yarn: Yarn | None = None


@dataclass(frozen=True)
class Indexer:
    """The lightning indexer: ``score[t,j] = sum_h w[t,h] * relu(q[t,h] . k[j])``, then the ``topk`` largest.

    rope_layout: rotates the first ``rope_dims`` of ``dim``; ``none`` leaves them
    hadamard:    rotate query and key by H/sqrt(dim) before quantising (changes bytes, not exact scores)
    """

    heads: int
    dim: int
    topk: int
    rope_layout: str
    rope_dims: int
    norm_eps: float
    hadamard: bool = False
    scale_format: str = "ue8m0"


@dataclass(frozen=True)
class Kda:
    """Linear attention of the ``linear`` layers: per head a [dim, dim] fp32 state, and short convolutions on q, k and v."""

    heads: int
    dim: int
    conv_kernel: int


@dataclass(frozen=True)
class Body:
    """What a whole model has beside its sparse attention; a Geometry without one describes single layers only.

    dense_layers:    the first layers whose MLP is dense, ``dense_inter`` wide; all others route over experts
    moe_inter:       intermediate size of one routed expert; shared experts are one MLP of ``shared_experts * moe_inter``
    expert_latent:   width the routed experts work in, 0 when it is the hidden size (K3: rows are projected down and up again)
    residual_block:  layers per attention-residual block, 0 for a plain residual stream
    expert_format:   how the checkpoint stores routed experts apart from ``block_fp8``: ``bf16`` or ``mxfp4``
    next_layers:     next-token-prediction layers stored behind the last one; no step here uses them
    """

    vocab: int
    dense_layers: int
    dense_inter: int
    moe_inter: int
    experts: int
    experts_per_token: int
    shared_experts: int
    expert_latent: int = 0
    expert_latent_norm: bool = False
    residual_block: int = 0
    kda: Kda | None = None
    expert_format: str = "bf16"
    tied_embeddings: bool = False
    next_layers: int = 0


@dataclass(frozen=True)
class Geometry:
    """One model.

    schedule: per layer ``full`` (runs the indexer), ``shared`` (keeps the ids of the full layer before it) or ``linear``
              (no sparse attention: K3's KDA layers)
    latent_norm_eps: eps of the RMS norms on the query and key-value latents
    latent_scale: per-tensor scale of the plain fp8 latent record
    block_fp8: rows and columns of one weight-scale block, (0, 0) when weights are not block-quantised
    body:      the rest of the model, None when the configuration does not carry it
    """

    family: str
    name: str
    hidden: int
    layers: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: Rope
    v_dim: int
    softmax_scale: float
    latent_norm_eps: float
    output_gate: bool
    indexer: Indexer
    schedule: tuple[str, ...]
    max_context: int
    latent_format: str = "fp8"
    latent_scale: float = 1.0
    block_fp8: tuple[int, int] = (0, 0)
    body: Body | None = None

    @property
    def latent_dim(self) -> int:
        """Elements of one latent record: the compressed latent, then the rotary (or extra) key dims."""
        return self.kv_lora + self.rope.dims

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """0-based layers that attend sparsely."""
        return tuple(i for i, kind in enumerate(self.schedule) if kind != "linear")

    @property
    def full_layers(self) -> tuple[int, ...]:
        """0-based layers that run an indexer and own an index cache."""
        return tuple(i for i, kind in enumerate(self.schedule) if kind == "full")


@dataclass(frozen=True)
class Formats:
    """Stored dtypes, an input of the plan.

    activation: hidden rows, latents, queries and outputs (``bf16`` or ``fp32``)
    weights:    resident projection weights (``bf16`` or ``fp32``)
    """

    index: str = "fp8"
    latent: str = "fp8"
    activation: str = "bf16"
    weights: str = "bf16"

    def __post_init__(self) -> None:
        legal = {"index": INDEX_FORMATS, "latent": LATENT_FORMATS, "activation": ("bf16", "fp32"), "weights": ("bf16", "fp32")}
        for name, choices in legal.items():
            if getattr(self, name) not in choices:
                raise Unsupported(f"{name} format {getattr(self, name)!r} is not supported; choose from {', '.join(choices)}")

    def replace(self, **changes: str) -> "Formats":
        return dataclasses.replace(self, **changes)


def index_record_bytes(geometry: Geometry, formats: Formats) -> int:
    """Bytes of one token's index record: fp8 values and one fp32 scale, or fp32 values."""
    dim = geometry.indexer.dim
    return dim + 4 if formats.index == "fp8" else 4 * dim


def latent_record_bytes(geometry: Geometry, formats: Formats) -> int:
    """Bytes of one token's latent record. Raises Unsupported for fp8_ds_mla when the latent is not whole 128-blocks."""
    if formats.latent == "fp8_ds_mla":
        if geometry.kv_lora % 128:
            raise Unsupported(
                f"latent format fp8_ds_mla needs kv_lora_rank {geometry.kv_lora} to be a multiple of 128; use fp8 or bf16"
            )
        return geometry.kv_lora + 4 * (geometry.kv_lora // 128) + 2 * geometry.rope.dims
    return geometry.latent_dim * {"fp8": 1, "bf16": 2, "fp32": 4}[formats.latent]
