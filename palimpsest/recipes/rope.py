"""Rotary embeddings: reading both spellings from a config, the softmax scale YaRN asks for, and the inverse-frequency table.

The table holds Python floats that are exact fp32 values. Every operation is done in fp64 and rounded once to fp32, which is
what fp32 arithmetic does for add, multiply and divide; the power is the fp64 one rounded, so it is the nearest fp32 (a vector
math library may differ by one unit in the last place for unusual bases; for the bases of the presets it does not, and a test
says so).
"""

import dataclasses
import math
import struct

from palimpsest.core.errors import BadConfig, Unsupported
from palimpsest.core.geometry import Geometry, Rope, Yarn
from palimpsest.recipes.config import Fields

_TYPES = ("default", "yarn")
#: bases far outside what models use; between them every frequency is a normal fp32 number
MIN_THETA, MAX_THETA = 2.0, 1e15
_YARN_KEYS = {
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
}
_KNOWN = _YARN_KEYS | {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


def read_rope(fields: Fields, *, layout: str, dims: int) -> Rope:
    """``rope_parameters`` (transformers 5) or ``rope_scaling`` with ``rope_theta`` (before), for ``dims`` rotary dims.

    A base inside the object wins over the one beside it, as in transformers. Raises BadConfig, and Unsupported for a rope type
    other than default or yarn, a partial rotation, or a YaRN that scales cos and sin.
    """
    chosen = [fields.inner(name) for name in ("rope_parameters", "rope_scaling") if fields.data.get(name)]
    if len(chosen) == 2 and _meaning(chosen[0]) != _meaning(chosen[1]):
        raise BadConfig(f"{chosen[0].where} and {chosen[1].where} disagree; keep one of them")
    rope = chosen[0] if chosen else Fields({}, fields.path("rope_parameters"))
    unknown = sorted(set(map(str, rope.data)) - _KNOWN)
    if unknown:
        raise Unsupported(f"{rope.path(unknown[0])} is not understood; understood: {', '.join(sorted(_KNOWN))}")
    kind = _rope_type(rope)
    for source in (rope, fields):
        if source.has("partial_rotary_factor") and source.number("partial_rotary_factor") != 1.0:
            raise Unsupported(
                f"{source.path('partial_rotary_factor')} = {source.data['partial_rotary_factor']}: only 1 is supported; "
                "qk_rope_head_dim says how many dims rotate"
            )
    theta = (rope if rope.has("rope_theta") else fields).number("rope_theta", least=MIN_THETA, most=MAX_THETA)
    return Rope(layout=layout, dims=dims, theta=theta, yarn=_yarn(rope) if kind == "yarn" else None)


def _meaning(rope: Fields) -> dict[str, object]:
    plain = {key: value for key, value in rope.data.items() if key not in ("type", "rope_type", "rope_theta")}
    return plain | {"kind": _rope_type(rope)}


def _rope_type(rope: Fields) -> str:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _TYPES:
        raise Unsupported(f"rope type {kind!r} in {rope.where} is not supported; supported: {', '.join(_TYPES)}")
    return kind


def _yarn(rope: Fields) -> Yarn:
    if rope.data.get("truncate") is False:
        raise Unsupported(f"{rope.path('truncate')} = false is not supported; it must be absent or true")
    scales = {
        name: rope.number(name, least=1e-3, most=1e3) if rope.data.get(name) else 0.0 for name in ("mscale", "mscale_all_dim")
    }
    yarn = Yarn(
        factor=rope.number("factor", least=1.0, most=1e6),
        original_context=rope.whole("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0, least=1e-3, most=1e6),
        beta_slow=rope.number("beta_slow", 1.0, least=1e-3, most=1e6),
        **scales,
    )
    scaled = rope.number("attention_factor") if rope.has("attention_factor") else _attention_factor(yarn)
    if scaled != 1.0:
        raise Unsupported(
            f"{rope.where} scales cos and sin by {scaled:.7g}; only 1 is supported: mscale {yarn.mscale:g} and mscale_all_dim "
            f"{yarn.mscale_all_dim:g} must be equal and not 0"
        )
    return yarn


def _attention_factor(yarn: Yarn) -> float:
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(nope: int, rope: Rope) -> float:
    """``(nope + rope dims) ** -0.5``, times ``(0.1 * mscale_all_dim * ln(factor) + 1) ** 2`` under YaRN."""
    scale = (nope + rope.dims) ** -0.5
    if rope.yarn is not None and rope.yarn.mscale_all_dim:
        mscale = _mscale(rope.yarn.factor, rope.yarn.mscale_all_dim)
        scale = scale * mscale * mscale
    return scale


def tables(geometry: Geometry) -> dict[str, tuple[float, ...]]:
    """Contents of the ``table`` buffers: ``inv_freq`` [rope dims / 2] as exact fp32 values; nothing without RoPE."""
    layouts = (geometry.rope.layout, geometry.indexer.rope_layout)
    return {} if layouts == ("none", "none") else {"inv_freq": inv_freq(geometry.rope)}


def inv_freq(rope: Rope) -> tuple[float, ...]:
    """``theta ** (-2i / dims)`` for each pair, corrected by YaRN (arXiv 2309.00071).

    Frequencies below ``beta_slow`` rotations over the original context are divided by ``factor``, those above ``beta_fast`` are
    kept, a linear ramp joins them.
    """
    powers = [_fp32(rope.theta ** _fp32(i / rope.dims)) for i in range(0, rope.dims, 2)]
    kept = [_fp32(1.0 / p) for p in powers]
    if rope.yarn is None:
        return tuple(kept)
    factor = _fp32(rope.yarn.factor)
    stretched = [_fp32(1.0 / _fp32(factor * p)) for p in powers]
    low, high = _correction_range(rope, rope.yarn)
    width = _fp32(high - low if high != low else 0.001)
    found = []
    for i, (keep, stretch) in enumerate(zip(kept, stretched, strict=True)):
        ramp = min(max(_fp32(_fp32(i - low) / width), 0.0), 1.0)
        weight = _fp32(1.0 - ramp)
        found.append(_fp32(_fp32(stretch * _fp32(1.0 - weight)) + _fp32(keep * weight)))
    return tuple(found)


def _correction_range(rope: Rope, yarn: Yarn) -> tuple[int, int]:
    def pair(rotations: float) -> float:
        return rope.dims * math.log(yarn.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    return max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), rope.dims - 1)


def _fp32(value: float) -> float:
    """``value`` rounded to the nearest fp32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def without_rope(dims: int) -> Rope:
    """Extra key dims that no layer rotates (Kimi K3)."""
    return dataclasses.replace(Rope("none", dims), theta=1.0)
