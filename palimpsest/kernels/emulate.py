"""The compiled engines' index scores in plain numpy, bit for bit: what ``amx-1`` and ``avx-1`` mean, and what tests hold the
kernels to.

Slow on purpose. Nothing here knows a tile, a thread or an instruction, only the order of roundings.
"""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

#: smallest normal fp32: AMX flushes what is below
_NORMAL = np.float32(2.0**-126)


def fma(a: F32, b: F32, c: F32) -> F32:
    """fp32(a * b + c) with one rounding. The product is exact in fp64; the sum is rounded to odd there, so the last rounding is
    right."""
    product, addend = a.astype(np.float64) * b, np.asarray(c, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        even = (total.view(np.int64) & 1) == 0
        away = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        odd = np.where(np.isfinite(total) & even & (error != 0), away, total)
        return odd.astype(np.float32)


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
