"""Exact streaming top-k of one row with AVX512 (``amx`` and ``avx`` engines): candidates, thresholds, compaction.

A score becomes a signed integer key that orders like the score (-0 as +0, NaN as -inf); a candidate is (key, token id), kept in
arrival order,
so ids ascend and "the first of equals" is "the lowest id". Once ``capacity`` candidates are held, quickselect finds the k-th
largest key, the
row keeps what is above it and the first of its equals, and from then on only strictly larger keys enter: a later equal has a
higher id.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from palimpsest.kernels.avx_topk import kth_of_few
from palimpsest.kernels.jit import intrinsic, piece
from palimpsest.kernels.llvm_ir import (
    ADDRESS,
    F32X16,
    I32,
    I32X16,
    I64,
    compress,
    const,
    count_lanes,
    load,
    offset,
    splat,
    store,
    value,
)  # fmt: skip

#: candidates beyond the capacity that the vector stores may touch
SLACK = 64
_SAMPLE = 15
_LANES = tuple(range(16))


def _valid(b: ir.IRBuilder, count: ir.Value, first: int) -> ir.Value:
    """Mask of lanes ``first + lane < count``."""
    return b.icmp_signed("<", const(I32X16, [first + lane for lane in _LANES]), splat(b, b.trunc(count, I32), I32X16))


@intrinsic
def push64(typing: Any, source: Any, valid: Any, least: Any, first: Any, keys: Any, ids: Any, count: Any) -> Any:
    """Append those of the first ``valid`` of 64 scores whose key exceeds ``least``; the first one's id is ``first``.

    Returns candidates held | NaN scores met << 32; ``count`` is what was held before.
    """

    def body(
        b: ir.IRBuilder,
        source: ir.Value,
        valid: ir.Value,
        least: ir.Value,
        first: ir.Value,
        keys: ir.Value,
        ids: ir.Value,
        count: ir.Value,
    ) -> ir.Value:
        bound, vectors, masks, lost = splat(b, least, I32X16), [], [], []
        for j in range(4):
            score = b.fadd(load(b, offset(b, source, 64 * j), F32X16), const(F32X16, 0.0))
            real, nan = _valid(b, valid, 16 * j), b.fcmp_unordered("uno", score, score)
            bits = b.bitcast(b.select(nan, const(F32X16, float("-inf")), score), I32X16)
            vectors.append(b.xor(bits, b.and_(b.ashr(bits, const(I32X16, 31)), const(I32X16, 0x7FFFFFFF))))
            masks.append(b.and_(b.icmp_signed(">", vectors[j], bound), real))
            lost.append(b.and_(nan, real))
        return _append(b, (vectors, masks, lost), first, keys, ids, count)

    return types.int64(ADDRESS, types.int64, types.int32, types.int64, ADDRESS, ADDRESS, types.int64), value(body)


def _append(
    b: ir.IRBuilder,
    found: tuple[list[ir.Value], list[ir.Value], list[ir.Value]],
    first: ir.Value,
    keys: ir.Value,
    ids: ir.Value,
    count: ir.Value,
) -> ir.Value:
    vectors, masks, lost = found
    seen = [b.or_(mask, nan) for mask, nan in zip(masks, lost, strict=True)]
    any_lane = b.icmp_unsigned(
        "!=", b.bitcast(b.or_(b.or_(seen[0], seen[1]), b.or_(seen[2], seen[3])), ir.IntType(16)), ir.IntType(16)(0)
    )
    before = b.block
    with b.if_then(any_lane):
        held, nans = count, I64(0)
        for j in range(4):
            token = b.add(splat(b, b.trunc(first, I32), I32X16), const(I32X16, [16 * j + lane for lane in _LANES]))
            at = b.shl(held, I64(2))
            store(b, compress(b, vectors[j], masks[j]), b.add(keys, at), 4)
            store(b, compress(b, token, masks[j]), b.add(ids, at), 4)
            held, nans = b.add(held, count_lanes(b, masks[j])), b.add(nans, count_lanes(b, lost[j]))
        packed, inside = b.or_(held, b.shl(nans, I64(32))), b.block
    result = b.phi(I64)
    result.add_incoming(count, before)
    result.add_incoming(packed, inside)
    return result


@intrinsic
def split16(typing: Any, source: Any, pivot: Any, valid: Any, high: Any, low: Any, counts: Any) -> Any:
    """Of the first ``valid`` of 16 keys, append those above ``pivot`` to ``high`` and those below to ``low``; counts = high |
    low << 32."""

    def body(
        b: ir.IRBuilder, source: ir.Value, pivot: ir.Value, valid: ir.Value, high: ir.Value, low: ir.Value, counts: ir.Value
    ) -> ir.Value:
        keys, bound, real = load(b, source, I32X16, 4), splat(b, pivot, I32X16), _valid(b, valid, 0)
        above, below = b.and_(b.icmp_signed(">", keys, bound), real), b.and_(b.icmp_signed("<", keys, bound), real)
        highs, lows = b.and_(counts, I64(0xFFFFFFFF)), b.lshr(counts, I64(32))
        store(b, compress(b, keys, above), b.add(high, b.shl(highs, I64(2))), 4)
        store(b, compress(b, keys, below), b.add(low, b.shl(lows, I64(2))), 4)
        return b.add(counts, b.add(count_lanes(b, above), b.shl(count_lanes(b, below), I64(32))))

    return types.int64(ADDRESS, types.int32, types.int64, ADDRESS, ADDRESS, types.int64), value(body)


@intrinsic
def keep16(typing: Any, keys: Any, ids: Any, valid: Any, least: Any, to_keys: Any, to_ids: Any, count: Any) -> Any:
    """Append, in order, those of 16 candidates whose key is at least ``least``; in place is fine. Returns the new count."""

    def body(
        b: ir.IRBuilder,
        keys: ir.Value,
        ids: ir.Value,
        valid: ir.Value,
        least: ir.Value,
        to_keys: ir.Value,
        to_ids: ir.Value,
        count: ir.Value,
    ) -> ir.Value:
        key, token = load(b, keys, I32X16, 4), load(b, ids, I32X16, 4)
        mask = b.and_(b.icmp_signed(">=", key, splat(b, least, I32X16)), _valid(b, valid, 0))
        at = b.shl(count, I64(2))
        store(b, compress(b, key, mask), b.add(to_keys, at), 4)
        store(b, compress(b, token, mask), b.add(to_ids, at), 4)
        return b.add(count, count_lanes(b, mask))

    return types.int64(ADDRESS, ADDRESS, types.int64, types.int32, ADDRESS, ADDRESS, types.int64), value(body)


@piece
def _pivot(keys, first, count, rank, sample):
    """An approximate ``rank``-th largest of keys[first : first+count]: a quantile of a small sample."""
    step = count // _SAMPLE
    for i in range(_SAMPLE):
        key, at = keys[first + i * step + (step >> 1)], i
        while at > 0 and sample[at - 1] < key:
            sample[at] = sample[at - 1]
            at -= 1
        sample[at] = key
    return sample[min(_SAMPLE - 1, rank * _SAMPLE // count)]


@piece
def kth_largest(keys, count, rank, work, sample):
    """The ``rank``-th largest of keys[:count] (1-based); ``keys`` stays. ``work`` [4 * (>= count + SLACK)], ``sample`` [16]:
    scratch, int32."""
    half = work.shape[0] // 4
    source, first, held, want, flip = keys, 0, count, rank, 0
    while held > 32:
        pivot = _pivot(source, first, held, want, sample)
        high, counts = 2 * flip * half, 0
        start, to = source.ctypes.data + np.uint64(4 * first), work.ctypes.data
        for j in range(0, held, 16):
            counts = split16(
                start + np.uint64(4 * j), pivot, held - j, to + np.uint64(4 * high), to + np.uint64(4 * (high + half)), counts
            )
        highs, lows = counts & 0xFFFFFFFF, counts >> 32
        if highs < want <= held - lows:
            return pivot
        source, flip = work, 1 - flip
        if want <= highs:
            first, held = high, highs
        else:
            want -= held - lows
            first, held = high + half, lows
    return kth_of_few(source, first, held, want)


@piece
def compact(keys, ids, count, topk, work, sample):
    """Keep the ``topk`` best of ``count`` candidates, in order; returns the k-th key. ``count`` > ``topk``."""
    least = kth_largest(keys, count, topk, work, sample)
    at_keys, at_ids, kept = keys.ctypes.data, ids.ctypes.data, 0
    for j in range(0, count, 16):
        at = np.uint64(4 * j)
        kept = keep16(at_keys + at, at_ids + at, count - j, least, at_keys, at_ids, kept)
    if kept > topk:  # drop the last equals: they have the highest ids
        excess, first = kept - topk, kept
        while excess > 0:
            first -= 1
            excess -= keys[first] == least
        to = first
        for j in range(first, kept):
            if keys[j] != least:
                keys[to], ids[to] = keys[j], ids[j]
                to += 1
    return least


@piece
def push_scores(group, row, scores, seen, first):
    """Offer scores[:seen] of tokens ``first``... to ``row`` of a group; returns how many were NaN. ``scores`` is readable up to
    a multiple of 64.

    group: candidates, ids [m, capacity], held, least [m], work, sample, topk
    """
    keys, ids, held, least = group.candidates[row], group.ids[row], group.held[row], group.least[row]
    capacity, nans = keys.shape[0] - SLACK, 0
    source, at_keys, at_ids = scores.ctypes.data, keys.ctypes.data, ids.ctypes.data
    for j in range(0, seen, 64):
        packed = push64(source + np.uint64(4 * j), seen - j, least, first + j, at_keys, at_ids, held)
        held = packed & 0xFFFFFFFF
        nans += packed >> 32
        if held > capacity - 64:
            least = compact(keys, ids, held, group.topk, group.work, group.sample)
            held = group.topk
    group.held[row], group.least[row] = held, least
    return nans


@piece
def emit_ids(group, out, counts):
    """Write a group's ids [m, topk], ascending and padded with -1, and their counts [m]."""
    topk = group.topk
    for row in range(out.shape[0]):
        count = group.held[row]
        if count > topk:
            compact(group.candidates[row], group.ids[row], count, topk, group.work, group.sample)
            count = topk
        counts[row] = count
        for j in range(topk):
            out[row, j] = group.ids[row, j] if j < count else np.int32(-1)
