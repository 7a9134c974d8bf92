"""The compiled engines' arithmetic in plain numpy, bit for bit: what ``amx-1`` and ``avx-1`` index scores and ``avx512-1``
attention and projections mean, and what tests hold the kernels to.

Slow on purpose. Nothing here knows a tile, a thread or an instruction, only the order of roundings.
"""

import math

import numpy as np
from numpy.typing import NDArray

from palimpsest.kernels.sizes import DEPTH_BLOCK

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

#: smallest normal fp32: AMX flushes what is below
_NORMAL = np.float32(2.0**-126)


def _odd(a: F32, b: F32, c: F32) -> F64:
    """a * b + c in fp64, rounded to odd: one more rounding to fewer bits is then as good as rounding once."""
    with np.errstate(invalid="ignore", over="ignore"):
        product, addend = a.astype(np.float64) * b, np.asarray(c, np.float64)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        even = (total.view(np.int64) & 1) == 0
        away = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where(np.isfinite(total) & even & (error != 0), away, total)


def fma(a: F32, b: F32, c: F32) -> F32:
    """fp32(a * b + c) with one rounding. The product is exact in fp64; the sum is rounded to odd there, so the last rounding is
    right."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _odd(a, b, c).astype(np.float32)


def _flushed(x: F32) -> F32:
    return np.where(np.abs(x) < _NORMAL, np.copysign(np.float32(0), x), x)


def amx_dot(left: F32, right: F32) -> F32:
    """TDPBF16PS over the last axis, 32 elements a step: [m, k] x [n, k] -> [m, n]. Values must be bf16; zeros fill the last step.

    A step: one FMA chain from +0 over the even elements, one over the odd ones; their sum is added to the total. Subnormals
    flush.
    """
    pad = -left.shape[1] % 32
    left, right = (
        np.pad(x, ((0, 0), (0, pad)))[:, None] if i == 0 else np.pad(x, ((0, 0), (0, pad)))[None]
        for i, x in enumerate((left, right))
    )
    total = np.zeros(np.broadcast_shapes(left.shape[:2], right.shape[:2]), np.float32)
    for first in range(0, left.shape[2], 32):
        chains = []
        for parity in (0, 1):
            chain = np.zeros_like(total)
            for d in range(first + parity, first + 32, 2):
                chain = _flushed(fma(left[:, :, d], right[:, :, d], chain))
            chains.append(chain)
        total = _flushed(total + _flushed(chains[0] + chains[1]))
    return total


def amx_scores(query: F32, weights: F32, keys: F32, scales: F32) -> F32:
    """``amx-1`` scores [n] of one row: query [heads, dim], weights [heads], keys [n, dim], scales [n]."""
    dots = amx_dot(query, keys)
    total = np.zeros(len(keys), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for weight, dot in zip(weights, dots, strict=True):
            total = fma(np.broadcast_to(weight, total.shape), np.maximum(dot, np.float32(0)), total)
        return total * scales + np.float32(0)


def avx_scores(query: F32, weights: F32, keys: F32, scales: F32) -> F32:
    """``avx-1`` scores [n] of one row; arguments as ``amx_scores``. Products of e4m3 values are exact in fp32, so each step
    rounds once."""
    total = np.zeros(len(keys), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for weight, head in zip(weights, query, strict=True):
            dot = np.zeros(len(keys), np.float32)
            for d in range(keys.shape[1]):
                dot = dot + head[d] * keys[:, d]
            total = total + weight * np.maximum(dot, np.float32(0))
        return total * scales + np.float32(0)


# -- attention, avx512-1

#: ids of a block; what an online maximum starts from; what stands for no score at all
_BLOCK, _FIRST, _LOW = 128, np.float32(-np.inf), np.float32(-3e38)
#: Taylor coefficients of 2^x
_POWERS = [np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7)]


def to_bf16(x: F32) -> F32:
    """fp32 rounded to the nearest bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)


def vdpbf16ps(total: F32, x: tuple[F32, F32], y: tuple[F32, F32]) -> F32:
    """total + x[1] y[1] + x[0] y[0] in that order, x and y the low and high elements of bf16 pairs; broadcasts.

    Two FMAs. A subnormal operand counts as zero of its sign, and so does a result that would be subnormal, judged after rounding
    to 24 bits.
    """
    for low in (1, 0):
        exact = _odd(_flushed(x[low]), _flushed(y[low]), _flushed(total))
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = exact.astype(np.float32)
        total = np.where(np.abs(exact) < float(_NORMAL) * (1 - 2.0**-25), np.copysign(np.float32(0), rounded), rounded)
    return total


def exp2(x: F32) -> F32:
    """2^x for x <= 0: a polynomial of degree 6 around the nearest integer; 0 for x < -126; NaN for NaN."""
    below, x = x < -126, np.where(x < -126, np.float32(-126), x)
    whole = np.rint(x)
    part, power = x - whole, np.full_like(x, _POWERS[-1])
    for coefficient in _POWERS[-2::-1]:
        power = fma(power, part, np.broadcast_to(coefficient, x.shape))
    shift = np.where(np.isnan(whole), 0, whole).astype(np.int32) << 23
    return np.where(below, np.float32(0), (power.view(np.int32) + shift).view(np.float32))


def avx512_logits(query: F32, records: F32) -> F32:
    """``avx512-1`` dots [heads, n] of query [heads, dim] and records [n, dim], all bf16: pairs of dims in ascending order, the
    even-numbered pairs in one chain from +0 and the odd-numbered in another; their sum."""
    query, records = (np.pad(x, ((0, 0), (0, -x.shape[1] % 4))) for x in (query, records))
    chains = [np.zeros((len(query), len(records)), np.float32) for _ in range(2)]
    for pair in range(query.shape[1] // 2):
        left, right = query[:, None, 2 * pair : 2 * pair + 2], records[None, :, 2 * pair : 2 * pair + 2]
        chain = vdpbf16ps(chains[pair % 2], (left[..., 0], left[..., 1]), (right[..., 0], right[..., 1]))
        chains[pair % 2] = chain
    return chains[0] + chains[1]


def avx512_attend(query: F32, records: F32, kv_lora: int, scale: float, factor: float) -> F32:
    """``avx512-1`` context [heads, kv_lora] of one row: query [heads, dim], records [n, dim] in the order of its ids, all bf16.

    scale: softmax scale, times the scale of the records, times log2(e); factor: the scale of the records
    """
    heads, times = len(query), np.float32(scale)
    if not len(records):
        return np.zeros((heads, kv_lora), np.float32)
    peak, total = np.full(heads, _FIRST), np.zeros(heads, np.float32)
    context = np.zeros((heads, kv_lora), np.float32)
    with np.errstate(all="ignore"):
        logits = avx512_logits(query, records)
        for first in range(0, len(records), _BLOCK):
            some, values = logits[:, first : first + _BLOCK], records[first : first + _BLOCK, :kv_lora]
            found, old = np.fmax.reduce(some, axis=1, initial=_LOW) * times, peak
            peak = np.where(found > old, found, old)
            shift = np.broadcast_to((np.float32(-0.0) - peak)[:, None], some.shape)
            p, alpha = to_bf16(exp2(fma(some, np.broadcast_to(times, some.shape), shift))), exp2(old - peak)
            if len(values) % 2:
                p, values = np.pad(p, ((0, 0), (0, 1))), np.pad(values, ((0, 1), (0, 0)))
            sums, added = np.zeros(heads, np.float32), np.zeros_like(context)
            for i in range(0, len(values), 2):
                sums = sums + p[:, i] + p[:, i + 1]
                added = vdpbf16ps(added, (p[:, i, None], p[:, i + 1, None]), (values[i], values[i + 1]))
            total = fma(total, alpha, sums)
            context = fma(context, np.broadcast_to(alpha[:, None], context.shape), added)
        return context / total[:, None] * np.float32(factor)


# -- projections, avx512-1


def split_bf16(x: F32) -> tuple[F32, F32]:
    """fp32 as a bf16 pair: high, and what is left rounded to bf16; zero where high is not finite."""
    high = to_bf16(x)
    with np.errstate(invalid="ignore"):
        low = to_bf16(x - high)
    return high, np.where(np.isfinite(high), low, np.float32(0))


def avx512_project(rows: F32, weight: F32, *, split: bool) -> F32:
    """``avx512-1`` projection [m, n]: rows [m, depth] @ weight [n, depth].T, weight bf16, rows bf16 or split into a bf16 pair.

    Per 512 elements of the depth one chain over its pairs in ascending order, from +0; with ``split`` one of the high and one of
    the low parts, and their sum. The blocks add up in ascending order from +0.
    """
    parts, total = split_bf16(rows) if split else (rows,), np.zeros((len(rows), len(weight)), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, rows.shape[1], DEPTH_BLOCK):
            block = []
            for part in parts:
                chain = np.zeros_like(total)
                for d in range(first, min(first + DEPTH_BLOCK, rows.shape[1]), 2):
                    left, right = part[:, None, d : d + 2], weight[None, :, d : d + 2]
                    chain = vdpbf16ps(chain, (left[..., 0], left[..., 1]), (right[..., 0], right[..., 1]))
                block.append(chain)
            total = total + (block[0] + block[1] if split else block[0])
    return total
