"""Exact streaming top-k of one row in plain loops (``avx`` engine): the method of ``avx512_topk`` without an intrinsic.

A score becomes a signed integer key that orders like the score (-0 as +0, NaN as -inf); candidates are kept in arrival order,
so ids ascend and
the first of equals has the lowest id.
"""

import numpy as np

from palimpsest.kernels.jit import piece

#: below every key, also that of -inf
LOWEST = np.int32(-(1 << 31))
#: keys looked at together
RUN = 64


@piece
def to_keys(scores, keys, count):
    """keys[:count] of scores[:count]; returns how many scores were NaN."""
    bits = scores.view(np.int32)
    nans = 0
    for j in range(count):
        nan = scores[j] != scores[j]
        bit = np.int32(-8388608) if nan else bits[j]  # -inf
        key = bit ^ ((bit >> np.int32(31)) & np.int32(0x7FFFFFFF))
        keys[j] = np.int32(0) if scores[j] == np.float32(0) else key
        nans += nan
    return nans


@piece
def _split(source, first, count, pivot, target, high, low):
    """Keys above ``pivot`` to target[high:], below to target[low:]; returns both numbers."""
    highs = lows = 0
    for j in range(first, first + count):
        key = source[j]
        target[high + highs] = key
        highs += key > pivot
        target[low + lows] = key
        lows += key < pivot
    return highs, lows


@piece
def _middle(keys, first, count, rank, sample):
    """An approximate ``rank``-th largest: a quantile of 15 keys."""
    step = count // 15
    for i in range(15):
        key, at = keys[first + i * step + (step >> 1)], i
        while at > 0 and sample[at - 1] < key:
            sample[at] = sample[at - 1]
            at -= 1
        sample[at] = key
    return sample[min(14, rank * 15 // count)]


@piece
def kth_of_few(keys, first, count, rank):
    """The ``rank``-th largest of keys[first : first + count], by comparing all with all; LOWEST when there is none."""
    for i in range(count):
        key, above, equal = keys[first + i], 0, 0
        for j in range(count):
            above += keys[first + j] > key
            equal += keys[first + j] == key
        if above < rank <= above + equal:
            return key
    return LOWEST


@piece
def kth_largest(keys, count, rank, work, sample):
    """The ``rank``-th largest of keys[:count] (1-based); ``keys`` stays. ``work`` [4 * (count + 1)], ``sample`` [16]: scratch,
    int32."""
    quarter = work.shape[0] // 4
    source, first, held, want, flip = keys, 0, count, rank, 0
    while held > 32:
        pivot = _middle(source, first, held, want, sample)
        high = 2 * flip * quarter
        highs, lows = _split(source, first, held, pivot, work, high, high + quarter)
        if highs < want <= held - lows:
            return pivot
        source, flip = work, 1 - flip
        if want <= highs:
            first, held = high, highs
        else:
            want -= held - lows
            first, held = high + quarter, lows
    return kth_of_few(source, first, held, want)


@piece
def compact(keys, ids, count, topk, work, sample):
    """Keep the ``topk`` best of ``count`` candidates, in order; returns the k-th key. ``count`` > ``topk``."""
    least = kth_largest(keys, count, topk, work, sample)
    above = 0
    for j in range(count):
        above += keys[j] > least
    equals, kept = topk - above, 0
    for j in range(count):
        key, token = keys[j], ids[j]
        equal = key == least and equals > 0
        equals -= equal
        keys[kept], ids[kept] = key, token
        kept += key > least or equal
    return least


@piece
def push_scores(group, row, scores, seen, first):
    """Offer scores[:seen] of tokens ``first``... to ``row`` of a group; returns how many were NaN.

    group: candidates, ids [m, capacity], held, least [m], line [>= seen], work, sample, topk
    """
    line, keys, ids, held, least = group.line, group.candidates[row], group.ids[row], group.held[row], group.least[row]
    nans, capacity = to_keys(scores, line, seen), keys.shape[0] - RUN
    for start in range(0, seen, RUN):
        stop, best = min(start + RUN, seen), LOWEST
        for j in range(start, stop):
            best = max(best, line[j])
        if best > least:
            for j in range(start, stop):
                keys[held], ids[held] = line[j], first + j
                held += line[j] > least
            if held > capacity:
                least = compact(keys, ids, held, group.topk, group.work, group.sample)
                held = group.topk
    group.held[row], group.least[row] = held, least
    return nans
