"""The union of neighbouring rows' ids, and which rows attend each: merged window by window, so that scratch does not grow with
the history."""

from typing import Annotated, Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types

from palimpsest.kernels.jit import Array, intrinsic, piece
from palimpsest.kernels.llvm_ir import I64, call, value
from palimpsest.kernels.sizes import UNION_WINDOW


class Joined(NamedTuple):
    """union [most ids]; masks [ids, head tiles]: lanes that attend; bits, before [words]: one window and the ids before each
    word;
    places, ends [rows]: where each row stands."""

    union: Annotated[Array, "i4[::1]"]
    masks: Annotated[Array, "u2[:,::1]"]
    bits: Annotated[Array, "u8[::1]"]
    before: Annotated[Array, "i4[::1]"]
    places: Annotated[Array, "i4[::1]"]
    ends: Annotated[Array, "i4[::1]"]


@intrinsic
def ones(typing: Any, word: Any) -> Any:
    """Set bits."""
    return types.int64(types.uint64), value(lambda b, word: call(b, "llvm.ctpop.i64", I64, word))


@intrinsic
def lowest_bit(typing: Any, word: Any) -> Any:
    """Place of the lowest set bit."""
    return types.int64(types.uint64), value(lambda b, word: call(b, "llvm.cttz.i64", I64, word, ir.IntType(1)(0)))


@piece
def _mark(ids, counts, start, joined):
    """Set the bit of every id in the window from ``start``; ends[r] = the first id of row r past it."""
    bits, places, ends = joined.bits, joined.places, joined.ends
    for word in range(bits.shape[0]):
        bits[word] = np.uint64(0)
    for row in range(ids.shape[0]):
        place = places[row]
        while place < counts[row] and ids[row, place] < start + UNION_WINDOW:
            at = ids[row, place] - start
            bits[at >> 6] |= np.uint64(1) << np.uint64(at & 63)
            place += 1
        ends[row] = place


@piece
def _collect(start, held, joined):
    """Append the window's ids to the union and clear their masks; returns how many there are now, -1 when they do not fit."""
    bits, before, union, masks = joined.bits, joined.before, joined.union, joined.masks
    total = held
    for word in range(bits.shape[0]):
        before[word] = total
        total += ones(bits[word])
    if total > union.shape[0]:
        return -1
    for word in range(bits.shape[0]):
        left, at = bits[word], before[word]
        while left:
            union[at] = start + 64 * word + lowest_bit(left)
            at += 1
            left &= left - np.uint64(1)
    for i in range(held, total):
        for tile in range(masks.shape[1]):
            masks[i, tile] = 0
    return total


@piece
def join(ids, counts, lanes, heads, most, joined):
    """union[:n] = distinct ids of the rows, ascending; masks[i, tile] = lanes that attend union[i]; returns n, or -1 when more
    than ``most``.

    ids [m, topk] ascending, counts [m]; lanes: of one row (8 or 16), of which ``heads`` are real
    """
    places, ends, held = joined.places, joined.ends, 0
    for row in range(ids.shape[0]):
        places[row] = 0
    while True:
        lowest = -1
        for row in range(ids.shape[0]):
            if places[row] < counts[row] and (lowest < 0 or ids[row, places[row]] < lowest):
                lowest = ids[row, places[row]]
        if lowest < 0:
            return held
        start = lowest // UNION_WINDOW * UNION_WINDOW
        _mark(ids, counts, start, joined)
        held = _collect(start, held, joined)
        if held < 0 or held > most:
            return -1
        for row in range(ids.shape[0]):
            tile, lane = row * lanes // 16, np.uint16(((1 << heads) - 1) << (row * lanes % 16))
            for place in range(places[row], ends[row]):
                at = ids[row, place] - start
                below = joined.bits[at >> 6] & ((np.uint64(1) << np.uint64(at & 63)) - np.uint64(1))
                joined.masks[joined.before[at >> 6] + ones(below), tile] |= lane
            places[row] = ends[row]
