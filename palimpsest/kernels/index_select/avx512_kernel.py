"""index_select with VDPBF16PS (AVX512_BF16): the ``avx`` engine where the compile target has it. Same bits as ``avx_kernel``.

To each fp32 lane VDPBF16PS adds the product of the high halves of two pairs of bf16, then that of the low halves, each rounded
to nearest even like an FMA. e4m3 is exact in bf16, so with dim d in the high half and d + 1 in the low one a chain of them is
the ``avx-1`` dot: exact products in ascending order, from +0. (It flushes subnormals, but a sum of multiples of 2^-18 is never
one.) ``avx.py`` checks the machine's order of roundings before it uses this file.
"""

from typing import Annotated, Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types

from palimpsest.kernels.avx512_decode import pack64_high_first, pack_high_first
from palimpsest.kernels.avx512_topk import emit_ids, push_scores
from palimpsest.kernels.avx_topk import LOWEST
from palimpsest.kernels.jit import Array, intrinsic, kernel, piece
from palimpsest.kernels.llvm_ir import (
    ADDRESS,
    BF16X32,
    F32,
    F32X16,
    I32,
    I32X16,
    I64,
    call,
    const,
    load,
    offset,
    splat,
    store,
    void,
)  # fmt: skip

#: keys of one register block, in vectors of 16
VECTORS = 3
BLOCK = 16 * VECTORS
#: keys of one tile: whole register blocks, and whole runs of 64 for the top-k
TILE = 960


class Group(NamedTuple):
    """Scratch of one thread: a group of m rows against one key tile.

    wide [m, dim/2, heads] queries in pairs of bf16, weights [m, heads]: heads and dims in whole fours; packed [tile/BLOCK,
    dim/2, BLOCK] flat:
    keys in pairs of bf16; tail [16, dim]: rows padded with zeros; scales [tile]; scores [1 or more, tile]; the rest as in
    ``amx_kernel.Group``
    """

    wide: Annotated[Array, "i4[:,:,::1]"]
    weights: Annotated[Array, "f4[:,::1]"]
    packed: Annotated[Array, "i4[::1]"]
    tail: Annotated[Array, "u1[:,::1]"]
    scales: Annotated[Array, "f4[::1]"]
    scores: Annotated[Array, "f4[:,::1]"]
    candidates: Annotated[Array, "i4[:,::1]"]
    ids: Annotated[Array, "i4[:,::1]"]
    held: Annotated[Array, "i8[::1]"]
    least: Annotated[Array, "i4[::1]"]
    seen: Annotated[Array, "i8[::1]"]
    work: Annotated[Array, "i4[::1]"]
    sample: Annotated[Array, "i4[::1]"]
    topk: Annotated[int, "i8"]


def _dots(b: ir.IRBuilder, keys: ir.Value, query: ir.Value, pitch: ir.Value, pairs: ir.Value, heads: int) -> list[list[ir.Value]]:
    """Dots of ``heads`` heads with BLOCK keys, a loop over the pairs of dims: every sum stays in a register."""
    before, loop, after = b.block, b.append_basic_block("pairs"), b.append_basic_block("dots")
    b.branch(loop)
    b.position_at_end(loop)
    index, at_keys, at_query = b.phi(I64), b.phi(I64), b.phi(I64)
    sums = [[b.phi(F32X16) for _ in range(VECTORS)] for _ in range(heads)]
    key = [b.bitcast(load(b, offset(b, at_keys, 64 * n), I32X16, 64), BF16X32) for n in range(VECTORS)]
    added = []
    for head in range(heads):
        pair = b.bitcast(splat(b, load(b, offset(b, at_query, 4 * head), I32, 4), I32X16), BF16X32)
        added.append([call(b, "llvm.x86.avx512bf16.dpbf16ps.512", F32X16, sums[head][n], pair, key[n]) for n in range(VECTORS)])
    following = b.add(index, I64(1)), b.add(at_keys, I64(4 * BLOCK)), b.add(at_query, pitch)
    for phi, start, step in zip((index, at_keys, at_query), (I64(0), keys, query), following, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(step, loop)
    for head in range(heads):
        for n in range(VECTORS):
            sums[head][n].add_incoming(const(F32X16, 0.0), before)
            sums[head][n].add_incoming(added[head][n], loop)
    b.cbranch(b.icmp_signed("<", following[0], pairs), loop, after)
    b.position_at_end(after)
    return added


@intrinsic(prefer_literal=True)
def add_heads(typing: Any, heads: Any, keys: Any, query: Any, pitch: Any, pairs: Any, weights: Any, total: Any) -> Any:
    """total[BLOCK] += weights[h] * relu(dot[h]) for ``heads`` heads in ascending order, two roundings each, a NaN staying a
    NaN."""
    count = heads.literal_value

    def body(b: ir.IRBuilder, _: ir.Value, keys: ir.Value, query: ir.Value, pitch: ir.Value, *rest: ir.Value) -> None:
        pairs, weights, total = rest
        dots, zero = _dots(b, keys, query, pitch, pairs, count), const(F32X16, 0.0)
        sums = [load(b, offset(b, total, 64 * n), F32X16, 64) for n in range(VECTORS)]
        for head in range(count):
            weight = splat(b, load(b, offset(b, weights, 4 * head), F32, 4), F32X16)
            for n in range(VECTORS):
                dot = dots[head][n]
                sums[n] = b.fadd(sums[n], b.fmul(weight, b.select(b.fcmp_ordered(">", zero, dot), zero, dot)))
        for n in range(VECTORS):
            store(b, sums[n], offset(b, total, 64 * n), 64)

    return types.void(heads, ADDRESS, ADDRESS, types.int64, types.int64, ADDRESS, ADDRESS), void(body)


@intrinsic
def zero_block(typing: Any, scores: Any) -> Any:
    """scores[BLOCK] = 0"""

    def body(b: ir.IRBuilder, scores: ir.Value) -> None:
        for n in range(VECTORS):
            store(b, const(F32X16, 0.0), offset(b, scores, 64 * n), 64)

    return types.void(ADDRESS), void(body)


@intrinsic
def scale_block(typing: Any, scores: Any, scales: Any) -> Any:
    """scores[BLOCK] = scores * scales + 0.0"""

    def body(b: ir.IRBuilder, scores: ir.Value, scales: ir.Value) -> None:
        for n in range(VECTORS):
            at = offset(b, scores, 64 * n)
            product = b.fmul(load(b, at, F32X16, 64), load(b, offset(b, scales, 64 * n), F32X16, 64))
            store(b, b.fadd(product, const(F32X16, 0.0)), at, 64)

    return types.void(ADDRESS, ADDRESS), void(body)


@piece
def _pack16(codes, first, count, tail, to, step):
    """Rows [first, first + count) of codes [n, dim], zeros up to 16 rows, as pairs [dim/2][16] at ``to``, a pair every ``step``
    bytes."""
    dim, width = codes.shape[1], tail.shape[1]
    at = codes.ctypes.data + np.uint64(first * dim)
    if count < 16 or dim != width:
        for j in range(16):
            for d in range(width):
                tail[j, d] = codes[first + j, d] if j < count and d < dim else 0
        at = tail.ctypes.data
    whole = width - width % 64
    for d in range(0, whole, 64):
        pack64_high_first(at + np.uint64(d), width, to + np.uint64((d >> 1) * step), step)
    for d in range(whole, width, 4):
        pack_high_first(at + np.uint64(d), width, to + np.uint64((d >> 1) * step), step)


@kernel(Group, "u1[:,:,::1]", "f4[:,::1]")
def begin(group, queries, weights):
    """Pack a group's queries [m, heads, dim] e4m3 and copy its weights, zeros up to the padded sizes; forget all candidates."""
    rows, heads, _ = queries.shape
    wide, work = group.wide, group.packed
    for row in range(rows):
        for first in range(0, wide.shape[2], 16):
            _pack16(queries[row], first, min(16, heads - first), group.tail, work.ctypes.data, 64)
            some = min(16, wide.shape[2] - first)
            for pair in range(wide.shape[1]):
                for head in range(some):
                    wide[row, pair, first + head] = work[16 * pair + head]
        for head in range(wide.shape[2]):
            group.weights[row, head] = weights[row, head] if head < heads else np.float32(0)
        group.held[row], group.least[row] = 0, LOWEST


@piece
def _pack_keys(keys, first, count, group):
    """Keys [first, first + count), zeros up to whole blocks."""
    pairs, to = group.wide.shape[1], group.packed.ctypes.data
    for block in range(0, count, BLOCK):
        for n in range(VECTORS):
            at = block + 16 * n
            _pack16(keys, first + at, max(0, min(16, count - at)), group.tail, to + np.uint64(64 * n), 4 * BLOCK)
        to += np.uint64(4 * BLOCK * pairs)


@piece
def _score_row(group, row, visible, line):
    """line[:visible] = scores of ``row`` against the packed tile, computed in whole blocks."""
    pairs, heads = group.wide.shape[1], group.wide.shape[2]
    query, weights = group.wide[row].ctypes.data, group.weights[row].ctypes.data
    block, scale, score = group.packed.ctypes.data, group.scales.ctypes.data, line.ctypes.data
    pitch, whole = 4 * heads, heads - heads % 8
    for _ in range(0, visible, BLOCK):
        zero_block(score)
        for head in range(0, whole, 8):
            at = np.uint64(4 * head)
            add_heads(8, block, query + at, pitch, pairs, weights + at, score)
        if whole < heads:
            at = np.uint64(4 * whole)
            add_heads(4, block, query + at, pitch, pairs, weights + at, score)
        scale_block(score, scale)
        block += np.uint64(4 * BLOCK * pairs)
        scale += np.uint64(4 * BLOCK)
        score += np.uint64(4 * BLOCK)


@kernel(Group, "u1[:,::1]", "f4[::1]", "i8[::1]", "i8", "i8", "b1", "i4[::1]")
def pass_tiles(group, keys, scales, seen, start, stop, shared, nans):
    """Score tokens [start, stop) for a group and offer them to its candidates. Row i sees the first ``seen[i]`` tokens of all.

    shared: every row's scores overwrite the same line; else row i's stay in line i until the next tile
    """
    tile = group.scores.shape[1]
    for first in range(start, stop, tile):
        count = min(tile, stop - first)
        _pack_keys(keys, first, count, group)
        for j in range(tile):
            group.scales[j] = scales[first + j] if j < count else np.float32(0)
        for row in range(seen.shape[0]):
            visible = min(count, seen[row] - first)
            if visible > 0:
                line = group.scores[0 if shared else row]
                _score_row(group, row, visible, line)
                nans[row] += push_scores(group, row, line, visible, first)


@kernel(Group, "i4[:,::1]", "i4[::1]")
def emit(group, out, counts):
    """Write a group's ids [m, topk], ascending and padded with -1, and their counts [m]."""
    emit_ids(group, out, counts)
