"""The two products of attention with VDPBF16PS (``avx512`` engine), sums in registers throughout.

VDPBF16PS adds to an fp32 lane the product of the high halves of two pairs of bf16, then that of the low halves; every addition
rounds like an FMA, subnormals count as zero. Import only where ``detect`` offers ``avx512``: compiling it for another target
ends the process.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from palimpsest.kernels.avx512_decode import PAIR_HIGH, PAIR_LOW
from palimpsest.kernels.jit import intrinsic
from palimpsest.kernels.llvm_ir import (
    ADDRESS,
    BF16X32,
    F32,
    F32X16,
    I8,
    I16X32,
    I32,
    I32X16,
    I64,
    I64X8,
    call,
    const,
    fma,
    load,
    offset,
    shuffle,
    splat,
    store,
    void,
)  # fmt: skip
from palimpsest.kernels.sizes import AMX_ID_BLOCK

#: heads of one vector of queries: two lanes each, one per chain
OCTET = 8
_EVEN, _ODD = tuple(range(0, 32, 2)), tuple(range(1, 32, 2))
#: bytes of one head's probabilities in a block
_P_ROW = 2 * AMX_ID_BLOCK


def dp(b: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """VDPBF16PS."""
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", F32X16, total, b.bitcast(x, BF16X32), b.bitcast(y, BF16X32))


#: what one step makes of the pointers and sums: new sums
_Step = Callable[[list[ir.Value], list[ir.Value]], list[ir.Value]]


def _loop(
    b: ir.IRBuilder, count: ir.Value, starts: list[ir.Value], steps: list[ir.Value], sums: int, body: _Step
) -> list[ir.Value]:
    """``body`` ``count`` > 0 times; pointers advance by ``steps``, sums start from +0 and stay in registers."""
    before, loop, after = b.block, b.append_basic_block("step"), b.append_basic_block("summed")
    b.branch(loop)
    b.position_at_end(loop)
    index, at, held = b.phi(I64), [b.phi(I64) for _ in starts], [b.phi(F32X16) for _ in range(sums)]
    added = body(at, held)
    for phi, start, step in zip([index, *at], [I64(0), *starts], [I64(1), *steps], strict=True):
        following = b.add(phi, step)
        phi.add_incoming(start, before)
        phi.add_incoming(following, loop)
        if phi is index:
            more = b.icmp_signed("<", following, count)
    for phi, total in zip(held, added, strict=True):
        phi.add_incoming(const(F32X16, 0.0), before)
        phi.add_incoming(total, loop)
    b.cbranch(more, loop, after)
    b.position_at_end(after)
    return added


def _dots(ids: int, octets: int, ahead: bool = False) -> Callable[..., None]:
    """``ids`` records times ``octets`` vectors of queries; ids a multiple of 4. ``ahead``: a step asks for one of ``lines``."""

    def body(b: ir.IRBuilder, *operands: ir.Value) -> None:
        records, width, queries, steps, scores, stride, lines = operands
        twice = b.shl(width, I64(1))
        down = [I64(0), width, twice, b.add(twice, width)]
        bases = [b.add(records, b.mul(width, I64(4 * n))) for n in range(ids // 4)]

        def step(at: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
            vectors = [load(b, q, I32X16, 64) for q in at[ids // 4 : ids // 4 + octets]]
            if ahead:
                line = b.inttoptr(load(b, at[-1], I64, 8), I8.as_pointer())
                call(b, "llvm.prefetch.p0", ir.VoidType(), line, I32(0), I32(3), I32(1))
            out = []
            for i in range(ids):
                four = splat(b, load(b, b.add(at[i // 4], down[i % 4]), I64, 8), I64X8)
                out += [dp(b, sums[i * octets + o], vector, four) for o, vector in enumerate(vectors)]
            return out

        starts = [*bases, *(b.add(queries, b.mul(steps, I64(64 * o))) for o in range(octets)), lines]
        moves = [I64(8)] * len(bases) + [I64(64)] * octets + [I64(8)]
        sums = _loop(b, steps, starts, moves, ids * octets, step)
        for i in range(ids):
            low, high = sums[i * octets], sums[i * octets + octets - 1]
            both = b.fadd(shuffle(b, low, high, _EVEN), shuffle(b, low, high, _ODD))
            store(b, both, b.add(scores, b.mul(stride, I64(i))), 64)

    return body


_DOTS = (ADDRESS, types.int64, ADDRESS, types.int64, ADDRESS, types.int64, ADDRESS)


@intrinsic
def dots_16x8(typing: Any, records: Any, width: Any, queries: Any, steps: Any, scores: Any, stride: Any, lines: Any) -> Any:
    """scores [16 ids, 16] = records [16 rows of ``width`` bytes] . queries [steps, 8 heads, 4 dims]; lanes 8 to 15 repeat 0 to 7.

    lines [steps]: addresses of cache lines, asked for one a step
    """
    return types.void(*_DOTS), void(_dots(16, 1, True))


@intrinsic
def dots_8x16(typing: Any, records: Any, width: Any, queries: Any, steps: Any, scores: Any, stride: Any, lines: Any) -> Any:
    """scores [8 ids, 16 heads], rows of ``stride`` bytes; queries [2, steps, 8 heads, 4 dims]."""
    return types.void(*_DOTS), void(_dots(8, 2))


@intrinsic
def dots_8x16_ahead(typing: Any, records: Any, width: Any, queries: Any, steps: Any, scores: Any, stride: Any, lines: Any) -> Any:
    """``dots_8x16``, asking for ``lines`` as ``dots_16x8`` does."""
    return types.void(*_DOTS), void(_dots(8, 2, True))


def _values(heads: int, vectors: int) -> Callable[..., None]:
    def body(b: ir.IRBuilder, *operands: ir.Value) -> None:
        _, p, records, pairs, totals, alphas, strides = operands
        width, row = (b.extract_value(strides, n) for n in range(2))

        def step(at: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
            values = []
            for n in range(vectors // 2):
                x, y = (load(b, offset(b, one, 64 * n), I16X32, 64) for one in at[:2])
                values += [shuffle(b, x, y, PAIR_LOW), shuffle(b, x, y, PAIR_HIGH)]
            out = []
            for head in range(heads):
                pair = splat(b, load(b, offset(b, at[2], _P_ROW * head), I32, 4), I32X16)
                out += [dp(b, sums[head * vectors + n], pair, one) for n, one in enumerate(values)]
            return out

        twice = b.shl(width, I64(1))
        sums = _loop(b, pairs, [records, b.add(records, width), p], [twice, twice, I64(4)], heads * vectors, step)
        for head in range(heads):
            alpha, to = splat(b, load(b, offset(b, alphas, 4 * head), F32, 4), F32X16), b.add(totals, b.mul(row, I64(head)))
            for n in range(vectors):
                at = offset(b, to, 64 * n)
                store(b, fma(b, load(b, at, F32X16, 64), alpha, sums[head * vectors + n]), at, 64)

    return body


@intrinsic(prefer_literal=True)
def add_values(typing: Any, heads: Any, p: Any, records: Any, pairs: Any, totals: Any, alphas: Any, strides: Any) -> Any:
    """totals [heads, columns] = totals * alphas [heads] + p [heads, 2 pairs of AMX_ID_BLOCK] @ records [2 pairs, columns].

    heads: 8 for 32 columns, at most 6 for 64; columns stay in COLUMN_ORDER within each 32; strides: bytes of a row of records
    and of totals
    """
    count = heads.literal_value
    numbers = ADDRESS, ADDRESS, types.int64, ADDRESS, ADDRESS, types.UniTuple(types.int64, 2)
    return types.void(heads, *numbers), void(_values(count, 2 if count > 6 else 4))
