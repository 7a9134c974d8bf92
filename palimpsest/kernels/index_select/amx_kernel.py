"""index_select on AMX: decode, pack, score and select of one group of rows over a range of key tiles, without a lock or an
allocation.

``amx-1`` scores: a dot adds 32 elements at a time, as one fp32 FMA chain over the even and one over the odd ones, their sum
added to the total
(TDPBF16PS, subnormals flushed); heads add in ascending order, ``total = fma(w, max(dot, 0), total)`` from +0; then times
the key's scale.
``kernels/emulate.py`` does the same in numpy, bit for bit.
"""

from typing import Annotated, Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types

from palimpsest.kernels.amx_ir import tile_begin, tile_dot, tile_end, tile_load, tile_store, tile_zero
from palimpsest.kernels.avx512_decode import decode_codes, pack_codes
from palimpsest.kernels.avx512_topk import emit_ids, push_scores
from palimpsest.kernels.avx_topk import LOWEST
from palimpsest.kernels.jit import Array, intrinsic, kernel, piece
from palimpsest.kernels.llvm_ir import ADDRESS, F32, F32X16, const, fma, load, offset, splat, store, void


class Group(NamedTuple):
    """Scratch of one thread: a group of m rows against one key tile.

    wide [m, heads, dim] bf16 queries, heads in whole pairs of tiles; weights [m, heads]; packed: the tile's keys as right
    tiles; tail: rows
    padded with zeros; scales [tile]; scores [1 or more, tile]; sums [32]; dots: two sets of four tiles; candidates (keys) and
    ids [m, capacity];
    held, least, seen [m]: candidates held, the key a new one must exceed, visible tokens; work, sample: of the top-k
    """

    wide: Annotated[Array, "u2[:,:,::1]"]
    weights: Annotated[Array, "f4[:,::1]"]
    packed: Annotated[Array, "u2[::1]"]
    tail: Annotated[Array, "u1[:,::1]"]
    scales: Annotated[Array, "f4[::1]"]
    scores: Annotated[Array, "f4[:,::1]"]
    sums: Annotated[Array, "f4[::1]"]
    dots: Annotated[Array, "f4[::1]"]
    candidates: Annotated[Array, "i4[:,::1]"]
    ids: Annotated[Array, "i4[:,::1]"]
    held: Annotated[Array, "i8[::1]"]
    least: Annotated[Array, "i4[::1]"]
    seen: Annotated[Array, "i8[::1]"]
    work: Annotated[Array, "i4[::1]"]
    sample: Annotated[Array, "i4[::1]"]
    topk: Annotated[int, "i8"]


@intrinsic
def add_heads(typing: Any, sums: Any, weights: Any, dots: Any) -> Any:
    """Eight heads of 32 keys: sums[32] = fma(weights[h], relu(dots[h]), sums); a NaN dot stays NaN.

    ``dots`` points into two adjacent tiles of [16 heads, 16 keys] fp32.
    """

    def body(b: ir.IRBuilder, sums: ir.Value, weights: ir.Value, dots: ir.Value) -> None:
        zero = const(F32X16, 0.0)
        total = [load(b, offset(b, sums, 64 * n), F32X16, 64) for n in range(2)]
        for head in range(8):
            weight = splat(b, load(b, offset(b, weights, 4 * head), F32, 4), F32X16)
            for n in range(2):
                dot = load(b, offset(b, dots, 1024 * n + 64 * head), F32X16, 64)
                total[n] = fma(b, weight, b.select(b.fcmp_ordered(">", zero, dot), zero, dot), total[n])
        for n in range(2):
            store(b, total[n], offset(b, sums, 64 * n), 64)

    return types.void(ADDRESS, ADDRESS, ADDRESS), void(body)


@intrinsic
def scale32(typing: Any, sums: Any, scales: Any, scores: Any) -> Any:
    """scores[32] = sums[32] * scales[32] + 0.0; sums[32] = 0"""

    def body(b: ir.IRBuilder, sums: ir.Value, scales: ir.Value, scores: ir.Value) -> None:
        for n in range(2):
            product = b.fmul(load(b, offset(b, sums, 64 * n), F32X16, 64), load(b, offset(b, scales, 64 * n), F32X16, 64))
            store(b, b.fadd(product, const(F32X16, 0.0)), offset(b, scores, 64 * n), 64)
            store(b, const(F32X16, 0.0), offset(b, sums, 64 * n), 64)

    return types.void(ADDRESS, ADDRESS, ADDRESS), void(body)


@piece
def _block(query, keys, weights, sums, dots, pairs, steps):
    """32 keys against one row's heads, 32 at a time: while the tiles multiply, the heads before are added up."""
    width = 64 * steps
    share = 4 // steps
    for pair in range(pairs):
        rows = query + np.uint64(pair * 32 * width)
        done = dots + np.uint64(4096 * ((pair + 1) & 1))
        before = weights + np.uint64(4 * 32 * (pair - 1))
        tile_zero(0)
        tile_zero(1)
        tile_zero(2)
        tile_zero(3)
        for step in range(steps):
            at = np.uint64(64 * step)
            tile_load(4, rows + at, width)
            tile_load(6, keys + np.uint64(1024 * step), 64)
            tile_dot(0, 4, 6)
            tile_load(5, rows + at + np.uint64(16 * width), width)
            tile_dot(2, 5, 6)
            tile_load(7, keys + np.uint64(1024 * (steps + step)), 64)
            tile_dot(1, 4, 7)
            tile_dot(3, 5, 7)
            if pair > 0:
                for part in range(step * share, (step + 1) * share):
                    add_heads(sums, before + np.uint64(32 * part), done + np.uint64(2048 * (part >> 1) + 512 * (part & 1)))
        now = dots + np.uint64(4096 * (pair & 1))
        tile_store(0, now, 64)
        tile_store(1, now + np.uint64(1024), 64)
        tile_store(2, now + np.uint64(2048), 64)
        tile_store(3, now + np.uint64(3072), 64)
    last = dots + np.uint64(4096 * ((pairs - 1) & 1))
    for part in range(4):
        add_heads(
            sums, weights + np.uint64(4 * 32 * (pairs - 1) + 32 * part), last + np.uint64(2048 * (part >> 1) + 512 * (part & 1))
        )


@piece
def _pack_keys(keys, first, count, tail, packed):
    """Keys [first, first + count) as right tiles [keys/16][steps][16 pairs, 16 keys, 2] bf16, zeros up to a multiple of 32
    keys."""
    dim, width = keys.shape[1], tail.shape[1]
    source, to, short = keys.ctypes.data, packed.ctypes.data, tail.ctypes.data
    for block in range(0, (count + 31) // 32 * 32, 16):
        at = source + np.uint64((first + block) * dim)
        if block + 16 > count or dim != width:
            for j in range(16):
                for d in range(width):
                    tail[j, d] = keys[first + block + j, d] if block + j < count and d < dim else 0
            at = short
        for d in range(0, width, 4):
            pack_codes(at + np.uint64(d), width, to + np.uint64(32 * d))
        to += np.uint64(32 * width)


@kernel(Group, "u1[:,:,::1]", "f4[:,::1]")
def begin(group, queries, weights):
    """Decode a group's queries [m, heads, dim] e4m3 to bf16 and copy its weights, zeros up to the padded sizes; forget all
    candidates."""
    rows, heads, dim = queries.shape
    wide, tail = group.wide, group.tail
    width, short = wide.shape[2], tail.ctypes.data
    for row in range(rows):
        source, to = queries[row].ctypes.data, wide[row].ctypes.data
        for head in range(wide.shape[1]):
            group.weights[row, head] = weights[row, head] if head < heads else np.float32(0)
            whole = head < heads and dim == width
            if not whole:
                for d in range(width):
                    tail[0, d] = queries[row, head, d] if head < heads and d < dim else 0
            at = source + np.uint64(head * dim) if whole else short
            for d in range(0, width, 64):
                decode_codes(at + np.uint64(d), to + np.uint64(2 * d))
            to += np.uint64(2 * width)
        group.held[row], group.least[row] = 0, LOWEST


@piece
def _score_row(group, row, visible, line):
    """line[:visible] = scores of ``row`` against the packed tile, computed in whole blocks of 32."""
    pairs, steps = group.wide.shape[1] // 32, group.wide.shape[2] // 32
    query, weights, total, parts = (
        group.wide[row].ctypes.data,
        group.weights[row].ctypes.data,
        group.sums.ctypes.data,
        group.dots.ctypes.data,
    )
    block, scale, score = group.packed.ctypes.data, group.scales.ctypes.data, line.ctypes.data
    for _ in range(0, visible, 32):
        _block(query, block, weights, total, parts, pairs, steps)
        scale32(total, scale, score)
        block += np.uint64(2048 * steps)
        scale += np.uint64(128)
        score += np.uint64(128)


@kernel(Group, "u1[:,::1]", "f4[::1]", "i8[::1]", "i8", "i8", "b1", "i4[::1]")
def pass_tiles(group, keys, scales, seen, start, stop, shared, nans):
    """Score tokens [start, stop) for a group and offer them to its candidates. Row i sees the first ``seen[i]`` tokens of all.

    shared: every row's scores overwrite the same line; else row i's stay in line i until the next tile
    """
    tile = group.scores.shape[1]
    tile_begin()
    for i in range(32):
        group.sums[i] = np.float32(0)
    for first in range(start, stop, tile):
        count = min(tile, stop - first)
        _pack_keys(keys, first, count, group.tail, group.packed)
        for j in range((count + 31) // 32 * 32):
            group.scales[j] = scales[first + j] if j < count else np.float32(0)
        for row in range(seen.shape[0]):
            visible = min(count, seen[row] - first)
            if visible > 0:
                line = group.scores[0 if shared else row]
                _score_row(group, row, visible, line)
                nans[row] += push_scores(group, row, line, visible, first)
    tile_end()


@kernel(Group, "i4[:,::1]", "i4[::1]")
def emit(group, out, counts):
    """Write a group's ids [m, topk], ascending and padded with -1, and their counts [m]."""
    emit_ids(group, out, counts)
