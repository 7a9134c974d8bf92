"""Online softmax of 16 heads over a block of tokens, and the pieces around it that need vectors (``amx`` and ``avx512`` engines).

Heads lie in lanes: scores are [tokens, heads] fp32, so no sum runs across lanes and a head's bits do not depend on its
neighbours.
exp2 is a degree-6 polynomial on [-0.5, 0.5] with the exponent added (relative error below 2^-22, measured by a test); a NaN
stays a NaN.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from palimpsest.kernels.avx512_decode import to_bf16
from palimpsest.kernels.jit import intrinsic, piece
from palimpsest.kernels.llvm_ir import (
    ADDRESS,
    F32,
    F32X16,
    I1X16,
    I16,
    I32,
    I32X16,
    I64,
    call,
    const,
    fma,
    load,
    offset,
    shuffle,
    splat,
    store,
    transpose16,
    value,
    void,
)  # fmt: skip
from palimpsest.kernels.sizes import AMX_ID_BLOCK

#: below every score that can occur, and finite, so that differences are too
LOW = float(np.float32(-3e38))
#: Taylor coefficients of 2^x = e^(x ln 2), rounded to fp32
_POWERS = tuple(
    float(np.float32(c))
    for c in (
        1.0,
        0.6931471805599453,
        0.2402265069591007,
        0.05550410866482158,
        0.009618129107628477,
        0.0013333558146428443,
        0.00015403530393381608,
    )
)


def exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^x for x <= 0; zero where x < -126, so that a record far below the others counts for nothing; NaN for NaN."""
    floor = const(F32X16, -126.0)
    below = b.fcmp_ordered("<", x, floor)
    x = b.select(below, floor, x)
    whole = call(b, "llvm.roundeven.v16f32", F32X16, x)
    part, power = b.fsub(x, whole), const(F32X16, _POWERS[-1])
    for coefficient in _POWERS[-2::-1]:
        power = fma(b, power, part, const(F32X16, coefficient))
    # the instruction itself, because fptosi of a NaN is undefined: it gives 1 << 31, which the shift turns into 0
    shift = call(b, "llvm.x86.avx512.mask.cvttps2dq.512", I32X16, whole, const(I32X16, 0), ir.Constant(I16, 0xFFFF), I32(4))
    found = b.bitcast(b.add(b.bitcast(power, I32X16), b.shl(shift, const(I32X16, 23))), F32X16)
    return b.select(below, const(F32X16, 0.0), found)


def _larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


class _Block:
    """Where the 16 heads' scores and mask bits of a token lie."""

    def __init__(self, b: ir.IRBuilder, scores: ir.Value, stride: ir.Value, masks: ir.Value | None):
        self.b, self.scores, self.stride, self.masks = b, scores, stride, masks
        self.mask_stride = b.lshr(stride, I64(5))  # 2 bytes where 16 heads have 64

    def token(self, number: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        b = self.b
        score = load(b, b.add(self.scores, b.mul(number, self.stride)), F32X16, 64)
        if self.masks is None:
            return score, None
        return score, b.bitcast(load(b, b.add(self.masks, b.mul(number, self.mask_stride)), I16, 2), I1X16)


def _maximum(b: ir.IRBuilder, block: _Block, tokens: ir.Value) -> ir.Value:
    low, slots = const(F32X16, LOW), []
    for _ in range(4):
        slots.append(cgutils.alloca_once_value(b, low))
        b.store(low, slots[-1])
    with cgutils.for_range(b, b.lshr(tokens, I64(2))) as loop:
        first = b.shl(loop.index, I64(2))
        for j, slot in enumerate(slots):
            score, mask = block.token(b.add(first, I64(j)))
            b.store(_larger(b, score if mask is None else b.select(mask, score, low), b.load(slot)), slot)
    found = [b.load(slot) for slot in slots]
    return _larger(b, _larger(b, found[0], found[1]), _larger(b, found[2], found[3]))


def _probabilities(b: ir.IRBuilder, block: _Block, tokens: ir.Value, scale: ir.Value, peak: ir.Value, out: ir.Value) -> ir.Value:
    """Write bf16 p of 16 heads as rows of AMX_ID_BLOCK; returns the sums of the rounded p, tokens added in order."""
    total, shift = cgutils.alloca_once_value(b, const(F32X16, 0.0)), b.fsub(const(F32X16, -0.0), peak)
    b.store(const(F32X16, 0.0), total)
    with cgutils.for_range(b, b.lshr(tokens, I64(5))) as loop:
        first, rows, sums = b.shl(loop.index, I64(5)), [], b.load(total)
        for pair in range(16):
            bits = []
            for j in range(2):
                score, mask = block.token(b.add(first, I64(2 * pair + j)))
                p = exp2(b, fma(b, score, scale, shift))
                if mask is not None:
                    p = b.select(mask, p, const(F32X16, 0.0))
                bits.append(to_bf16(b, p))
                sums = b.fadd(sums, b.bitcast(bits[j], F32X16))
            rows.append(b.or_(b.lshr(bits[0], const(I32X16, 16)), bits[1]))
        b.store(sums, total)
        for head, row in enumerate(transpose16(b, rows)):
            store(b, row, b.add(offset(b, out, 2 * AMX_ID_BLOCK * head), b.shl(loop.index, I64(6))), 64)
    return b.load(total)


def _softmax(masked: bool) -> Callable[..., Any]:
    def body(b: ir.IRBuilder, *operands: ir.Value) -> ir.Value:
        scores, stride, tokens, scale, state, out, masks = operands
        block, factor = _Block(b, scores, stride, masks if masked else None), splat(b, scale, F32X16)
        old = load(b, state, F32X16, 64)
        peak = _larger(b, b.fmul(_maximum(b, block, tokens), factor), old)
        alpha = exp2(b, b.fsub(old, peak))
        store(b, peak, state, 64)
        sums = _probabilities(b, block, tokens, factor, peak, out)
        at = offset(b, state, 64)
        store(b, fma(b, load(b, at, F32X16, 64), alpha, sums), at, 64)
        store(b, alpha, offset(b, state, 128), 64)
        same = b.fcmp_ordered("==", alpha, const(F32X16, 1.0))
        return b.zext(b.icmp_unsigned("!=", b.bitcast(same, I16), I16(0xFFFF)), I64)

    return body


_ARGUMENTS = (ADDRESS, types.int64, types.int64, types.float32, ADDRESS, ADDRESS, ADDRESS)


@intrinsic
def softmax16(typing: Any, scores: Any, stride: Any, tokens: Any, scale: Any, state: Any, out: Any, masks: Any) -> Any:
    """One block for 16 heads; returns 1 when an earlier block's sums must be rescaled.

    scores: [tokens, heads] fp32 rows of ``stride`` bytes; scale: softmax scale times log2(e); state: running maximum (scaled),
    sum and
    rescaling factor, 16 fp32 each; out: p as 16 rows of AMX_ID_BLOCK bf16; tokens: a multiple of 32
    """
    return types.int64(*_ARGUMENTS), value(_softmax(False))


@intrinsic
def softmax16_masked(typing: Any, scores: Any, stride: Any, tokens: Any, scale: Any, state: Any, out: Any, masks: Any) -> Any:
    """``softmax16`` where bit h of a token's 16-bit word says whether head h attends it; words lie stride / 32 bytes apart."""
    return types.int64(*_ARGUMENTS), value(_softmax(True))


@intrinsic
def scale_row(typing: Any, row: Any, factor: Any, columns: Any) -> Any:
    """row[columns] fp32 *= factor; a multiple of 16 columns."""

    def body(b: ir.IRBuilder, row: ir.Value, factor: ir.Value, columns: ir.Value) -> None:
        factors = splat(b, factor, F32X16)
        with cgutils.for_range(b, b.lshr(columns, I64(4))) as loop:
            at = b.add(row, b.shl(loop.index, I64(6)))
            store(b, b.fmul(load(b, at, F32X16, 64), factors), at, 64)

    return types.void(ADDRESS, types.float32, types.int64), void(body)


#: where true column c of 32 lies among 32 stored ones (the inverse of COLUMN_ORDER)
_BACK = tuple(4 * (c // 8) + c % 8 if c % 8 < 4 else 16 + 4 * (c // 8) + c % 8 - 4 for c in range(32))


@intrinsic
def divide32(typing: Any, row: Any, whole: Any, factor: Any, out: Any) -> Any:
    """out[32] = row[32] / whole * factor, two roundings, columns put back in order."""

    def body(b: ir.IRBuilder, row: ir.Value, whole: ir.Value, factor: ir.Value, out: ir.Value) -> None:
        sums, factors = splat(b, whole, F32X16), splat(b, factor, F32X16)
        x, y = (b.fmul(b.fdiv(load(b, offset(b, row, at), F32X16, 64), sums), factors) for at in (0, 64))
        for half in range(2):
            store(b, shuffle(b, x, y, _BACK[16 * half : 16 * half + 16]), offset(b, out, 64 * half), 4)

    return types.void(ADDRESS, types.float32, types.float32, ADDRESS), void(body)


@intrinsic
def read_float(typing: Any, address: Any) -> Any:
    return types.float32(ADDRESS), value(lambda b, address: load(b, address, F32, 4))


@intrinsic
def read_address(typing: Any, address: Any) -> Any:
    return ADDRESS(ADDRESS), value(lambda b, address: load(b, address, I64, 8))


@intrinsic
def read_byte(typing: Any, address: Any) -> Any:
    return types.uint8(ADDRESS), value(lambda b, address: load(b, address, ir.IntType(8)))


@intrinsic
def write_word(typing: Any, address: Any, word: Any) -> Any:
    return types.void(ADDRESS, ADDRESS), void(lambda b, address, word: store(b, word, address))


@piece
def finish_head(work, head, factor, out):
    """out [latent] = totals[head] / its row sum * factor, columns in order."""
    totals, latent, whole = work.totals, out.shape[0], work.state[head // 16, 1, head % 16]
    source, to = totals[head].ctypes.data, out.ctypes.data
    last = latent // 32 * 32
    for column in range(0, last, 32):
        divide32(source + np.uint64(4 * column), whole, factor, to + np.uint64(4 * column))
    for c in range(latent - last):
        place = 4 * (c // 8) + c % 8 if c % 8 < 4 else 16 + 4 * (c // 8) + c % 8 - 4
        out[last + c] = totals[head, last + place] / whole * factor
