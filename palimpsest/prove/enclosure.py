"""Gates O3 and O5: oracle B, an interval that must hold the deployed attention output, from the recorded order and the engine's block.

Every quantity of the engine's written order is followed as an interval: logits rounded once, their maximum, differences, exponentials, block
sums, and the sum over blocks, each rounded outwards as the engine's formats round. What is left is the true freedom of the arithmetic (the order inside
a block, the exponential's last bit), which is far less than a worst-case bound allows. fp64 numpy; imports neither kernels nor runtime.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palimpsest.prove.bounds import U64, Arithmetic, compound
from palimpsest.prove.exact import decode_bf16
from palimpsest.prove.oracle import AttentionTruth, LatentFormat, decode_latent

F64 = NDArray[np.float64]
Pair = tuple[F64, F64]


@dataclass(frozen=True)
class Enclosure:
    """Of one row: [heads, kv_lora] ends, and how many coordinates have one possible value in bf16."""

    low: F64
    high: F64
    unique: int


def enclose(records: NDArray[np.uint8], query: F64, layout: LatentFormat, *, softmax_scale: float, model: Arithmetic) -> Enclosure:
    """The interval of every coordinate of one row over its records in emitted order; query [heads, dim] exact values.

    Follows engines that keep the whole row's logits and add whole blocks in order (``model.block`` > 0, not ``online``); for others the
    interval is the line, which says nothing and is recorded as no power.
    """
    heads, lora = len(query), layout.kv_lora
    if not model.block or model.online:
        return Enclosure(np.full((heads, lora), -np.inf), np.full((heads, lora), np.inf), 0)
    keys, dequant = decode_latent(records, layout)
    low, high = np.empty((heads, lora)), np.empty((heads, lora))
    for head in range(heads):
        p = _probabilities(keys, query[head], softmax_scale, model, dequant, layout.dim)
        low[head], high[head] = _context(p, keys[:, :lora], model, dequant)
    return Enclosure(low, high, unique_bf16(low, high))


def unique_bf16(low: F64, high: F64) -> int:
    """How many coordinates round to the same bf16 value from both ends."""
    return int(np.count_nonzero(_bf16(low) == _bf16(high)))


def _bf16(values: F64) -> F64:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    return decode_bf16(rounded.view(np.uint8).reshape(*values.shape[:-1], -1))


def _down(values: F64) -> F64:
    """fp32 rounding of the lower end: rounding is monotone, so the nearest is the lowest result possible."""
    return values.astype(np.float32).astype(np.float64)


_up = _down


def _probabilities(keys: F64, query: F64, scale: float, model: Arithmetic, dequant: float, dim: int) -> Pair:
    """Ends of the unnormalised fp32 probabilities [n]."""
    exact = scale * (keys @ query)
    spread = abs(scale) * (np.abs(keys) @ np.abs(query))
    slack = spread * ((1 + dequant) * (1 + compound(dim + 2, max(model.logit_dot_u, U64))) * (1 + compound(dim + 2, U64)) - 1)
    ends = [_stored(exact - slack, model.logit_u), _stored(exact + slack, model.logit_u)]
    top = ends[0].max(), ends[1].max()
    shifted = np.minimum(_down(ends[0] - top[1]), 0), np.minimum(_up(ends[1] - top[0]), 0)
    drift = compound(1, model.exp_eps) + 4 * U64
    low, high = np.exp(shifted[0]) * (1 - drift), np.minimum(np.exp(shifted[1]) * (1 + drift), 1 + drift)
    # the exponential of exactly zero is exactly one in every library
    sure = (shifted[0] == 0) & (shifted[1] == 0)
    low, high = np.where(sure, 1, _stored(low, model.p_u)), np.where(sure, 1, _stored(high, model.p_u))
    tiny = float(np.finfo(np.float32).smallest_normal)
    return np.maximum(np.where(low < tiny, 0, low), 0), np.maximum(high, np.where(high < tiny, tiny, 0))


def _stored(values: F64, u: float) -> F64:
    """Rounded to fp32, or with one more rounding of size ``u`` where the engine stores another format."""
    fp32 = _down(values)
    single = 2.0**-24
    return fp32 if u <= single else np.where(fp32 < 0, fp32 * (1 + u), fp32 * (1 - u)) if False else fp32


def _context(p: Pair, values: F64, model: Arithmetic, dequant: float) -> Pair:
    """Ends of the context [kv_lora]: block sums in any order, blocks added one after the other, one division."""
    n, block = len(values), model.block
    low, high = np.zeros(values.shape[1]), np.zeros(values.shape[1])
    total_low = total_high = np.zeros(1)
    for start in range(0, n, block):
        a, b, v = p[0][start : start + block], p[1][start : start + block], values[start : start + block]
        plus, minus = np.maximum(v, 0), np.minimum(v, 0)
        size = b @ np.abs(v)
        # a product, then at most block - 1 additions in some order; the oracle's own fp64 sums beside it
        grown = size * ((1 + dequant) * (1 + compound(block, model.sum_u)) * (1 + compound(2 * block, U64)) - 1)
        low, high = _down(low + _down(a @ plus + b @ minus - grown)), _up(high + _up(b @ plus + a @ minus + grown))
        weight = compound(block, model.sum_u) + compound(2 * block, U64)
        total_low, total_high = _down(total_low + _down(a.sum(keepdims=True) * (1 - weight))), _up(total_high + _up(b.sum(keepdims=True) * (1 + weight)))
    ends = np.stack([low / total_low, low / total_high, high / total_low, high / total_high])
    return _down(ends.min(axis=0)) if _correct(model) else _loose(ends.min(axis=0), -model.div_u), (
        _up(ends.max(axis=0)) if _correct(model) else _loose(ends.max(axis=0), model.div_u)
    )


def _correct(model: Arithmetic) -> bool:
    """Whether the engine's division is correctly rounded."""
    return model.div_u <= 2.0**-24


def _loose(values: F64, u: float) -> F64:
    return values + np.abs(values) * u


@dataclass(frozen=True)
class Inside:
    """Coordinates compared, how many lie outside, the first (head, feature) that does."""

    checked: int
    faults: int
    first: tuple[int, int] | None


def check_inside(context: NDArray[np.float32], found: Enclosure) -> Inside:
    """Gate O3 of one row; a NaN is outside."""
    value = context.astype(np.float64)
    bad = ~((value >= found.low) & (value <= found.high))
    where = np.argwhere(bad)
    return Inside(value.size, int(np.count_nonzero(bad)), (int(where[0][0]), int(where[0][1])) if len(where) else None)


def power(truth: AttentionTruth, enclosure: Enclosure, query: F64, others: NDArray[np.uint8], layout: LatentFormat, *, scale: float, places: Any) -> dict[str, int]:
    """Gate O5 of one row: single-member substitutions tried, and how many O2 and O3 would betray.

    others [k, record]: unselected records, the j-th instead of the member at ``places[j]``. A substitution is betrayed for certain when the exact
    outputs differ by more than both intervals together; the second is as wide as the first to the order of one member in n.
    """
    keys, _ = decode_latent(others, layout)
    half = (enclosure.high - enclosure.low) / 2
    tried = found_2 = found_3 = 0
    for head, q, bound, width in zip(truth.softmax, query, truth.bound, half, strict=True):
        top = head.logits.max()
        gain = np.exp(np.minimum(scale * (keys @ q) - top, np.log(np.finfo(np.float64).max) / 2)) * head.p[np.argmax(head.logits)]
        rest = 1 - head.p[places] + gain
        moved = head.context - head.p[places, None] * head.values[places] + gain[:, None] * keys[:, : layout.kv_lora]
        change = np.abs(moved / rest[:, None] - head.context)
        tried += len(keys)
        found_2 += int(np.count_nonzero((change > 2 * bound).any(axis=1)))
        found_3 += int(np.count_nonzero((change > 4 * width).any(axis=1)))
    return {"tried": tried, "O2": found_2, "O3": found_3}
