"""Append this chunk's latent records to the pages this rank owns."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import linear_scratch, norm_scratch, quantise_scratch, rotation_scratch, tile_scratch


def _scratch(hidden: int, kv_lora: int, rope_dims: int, format: str, engine: str = "portable", **_: object) -> int:
    quantise = quantise_scratch(kv_lora, 128) + tile_scratch(kv_lora) if format == "fp8_ds_mla" else 0
    width = kv_lora + rope_dims
    return (
        linear_scratch(hidden, width, engine=engine)
        + norm_scratch(kv_lora)
        + rotation_scratch(rope_dims)
        + tile_scratch(width)
        + quantise
    )


CONTRACT = OpContract(
    name="append_latent",
    summary="(c | kr) = hidden @ kv_a.T; c = rms_norm(c); kr = rope(kr); record in the latent format",
    operands=(
        Operand("hidden", "read", "[rows,hidden] bf16|fp32"),
        Operand("kv_a", "read", "[kv_lora+rope_dims,hidden] bf16|fp32"),
        Operand("kv_a_norm", "read", "[kv_lora] bf16|fp32"),
        Operand("rope", "read", "[rows,rope_dims/2,2] fp32", optional=True),
        Operand("latent_cache", "update", "[rank_pages,page*record] u8: whole records, one after the other"),
    ),
    params=("hidden", "kv_lora", "rope_dims", "eps", "rope_layout", "format", "latent_scale", "page", "ranks", "engine"),
    scratch=_scratch,
    exact="touches the records of tokens [history, history+rows) that this rank owns and nothing else",
)
