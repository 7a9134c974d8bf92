"""Gates O3 and O5: oracle B, an interval that must hold the deployed attention output, from the recorded order and the engine's
block.

Every quantity of the engine's written order is followed as an interval: logits rounded once, their maximum, differences,
exponentials, block sums, and the sum over blocks, each rounded outwards as the engine's formats round. What is left is the true
freedom of the arithmetic (the order inside a block, the exponential's last bit), which is far less than a worst-case bound
allows. fp64 numpy; imports neither kernels nor runtime.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palimpsest.prove.bounds import TINY32, U32, U64, Arithmetic, compound
from palimpsest.prove.exact import decode_bf16
from palimpsest.prove.oracle import AttentionTruth, LatentFormat, decode_latent

F64 = NDArray[np.float64]
Pair = tuple[F64, F64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Enclosure:
    """Of one row: [heads, kv_lora] ends, and how many coordinates have one possible value in bf16."""

    low: F64
    high: F64
    unique: int


def enclose(
    records: NDArray[np.uint8], query: F64, layout: LatentFormat, *, softmax_scale: float, model: Arithmetic
) -> Enclosure:
    """The interval of every coordinate of one row over its records in emitted order; query [heads, dim] exact values.

    For engines it cannot follow the interval is the line, which says nothing and is recorded as no power.
    """
    heads, lora = len(query), layout.kv_lora
    if not follows(model):
        return Enclosure(np.full((heads, lora), -np.inf), np.full((heads, lora), np.inf), 0)
    keys, dequant = decode_latent(records, layout)
    low, high = np.empty((heads, lora)), np.empty((heads, lora))
    for head in range(heads):
        p = _probabilities(keys, query[head], softmax_scale, model, dequant, layout.dim)
        low[head], high[head] = _context(p, keys[:, :lora], model, dequant)
    return Enclosure(low, high, unique_bf16(low, high))


def follows(model: Arithmetic) -> bool:
    """Whether the engine keeps a row's logits, stores fp32 probabilities, adds whole blocks in order, and divides with one
    rounding."""
    return bool(model.block) and not model.online and model.p_u == 0 and max(model.logit_u, model.div_u) <= U32


def unique_bf16(low: F64, high: F64) -> int:
    """How many coordinates round to the same bf16 value from both ends."""
    return int(np.count_nonzero(_bf16(low) == _bf16(high)))


def _bf16(values: F64) -> F64:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    return decode_bf16(rounded.view(np.uint8).reshape(*values.shape[:-1], -1))


def _fp32(values: F64) -> F64:
    """An end rounded to fp32: rounding is monotone, so a rounded end is an end of the rounded values."""
    return values.astype(np.float32).astype(np.float64)


def _probabilities(keys: F64, query: F64, scale: float, model: Arithmetic, dequant: float, dim: int) -> Pair:
    """Ends of the unnormalised fp32 probabilities [n]."""
    exact = scale * (keys @ query)
    spread = abs(scale) * (np.abs(keys) @ np.abs(query))
    slack = spread * ((1 + dequant) * (1 + compound(dim + 2, max(model.logit_dot_u, U64))) * (1 + compound(dim + 2, U64)) - 1)
    low, high = _fp32(exact - slack), _fp32(exact + slack)
    low, high = np.minimum(_fp32(low - high.max()), 0), np.minimum(_fp32(high - low.max()), 0)
    # the exponential of exactly zero is exactly one in every library
    sure = (low == 0) & (high == 0)
    drift = model.exp_eps + 4 * U64
    low, high = np.exp(low) * (1 - drift), np.exp(high) * (1 + drift)
    low, high = np.where(low < TINY32, 0, _fp32(low)), np.where(high < TINY32, TINY32, _fp32(high))
    return np.where(sure, 1, low), np.where(sure, 1, high)


def _context(p: Pair, values: F64, model: Arithmetic, dequant: float) -> Pair:
    """Ends of the context [kv_lora]: block sums in any order, blocks added one after the other, one division."""
    low = high = np.zeros(values.shape[1])
    least = most = np.zeros(1)
    for start in range(0, len(values), model.block):
        span = slice(start, start + model.block)
        a, b, v = p[0][span], p[1][span], values[span]
        plus, minus = np.maximum(v, 0), np.minimum(v, 0)
        # a product, then one addition less than there are ids, in some order (zeros that fill the last block add exactly); the
        # fp64
        # sums of this evaluation beside them
        factor = (1 + dequant) * (1 + compound(len(v), model.sum_u)) * (1 + compound(2 * model.block, U64)) - 1
        grown = (b @ np.abs(v)) * factor + len(v) * TINY32
        low, high = _fp32(low + _fp32(a @ plus + b @ minus - grown)), _fp32(high + _fp32(b @ plus + a @ minus + grown))
        least = _fp32(least + _fp32(a.sum(keepdims=True) * (1 - factor)))
        most = _fp32(most + _fp32(b.sum(keepdims=True) * (1 + factor)))
    ends = np.stack([low / least, low / most, high / least, high / most])
    return _fp32(ends.min(axis=0)), _fp32(ends.max(axis=0))


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


def power(
    truth: AttentionTruth,
    enclosure: Enclosure,
    query: F64,
    others: NDArray[np.uint8],
    layout: LatentFormat,
    *,
    scale: float,
    places: Places,
) -> dict[str, int]:
    """Gate O5 of one row: single-member substitutions tried, and how many O2 and O3 would betray.

    others [k, record]: unselected records, the j-th instead of the member at ``places[j]``. A substitution is betrayed for
    certain when the exact outputs differ by more than both intervals together; the second is as wide as the first to the order
    of one member in n.
    """
    keys, _ = decode_latent(others, layout)
    away = np.maximum(enclosure.high - truth.context, truth.context - enclosure.low)
    tried = found_2 = found_3 = 0
    for head, q, bound, width in zip(truth.softmax, query, truth.bound, away, strict=True):
        top = head.logits.max()
        gain = np.exp(np.minimum(scale * (keys @ q) - top, np.log(np.finfo(np.float64).max) / 2)) * head.p[np.argmax(head.logits)]
        rest = 1 - head.p[places] + gain
        moved = head.context - head.p[places, None] * head.values[places] + gain[:, None] * keys[:, : layout.kv_lora]
        change = np.abs(moved / rest[:, None] - head.context)
        tried += len(keys)
        found_2 += int(np.count_nonzero((change > 2 * bound).any(axis=1)))
        found_3 += int(np.count_nonzero((change > 2 * width).any(axis=1)))
    return {"tried": tried, "O2": found_2, "O3": found_3}
