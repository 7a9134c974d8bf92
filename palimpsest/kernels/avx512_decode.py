"""Records in, bf16 operands out (AVX512 with VBMI; ``amx`` and ``avx`` engines).

An e4m3 code becomes bf16 by two 128-entry byte tables in registers: exact, NaN codes included, whatever the denormal mode of
the thread.
"""

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba.core import types

from palimpsest.kernels.detect import target_features
from palimpsest.kernels.jit import intrinsic
from palimpsest.kernels.llvm_ir import (
    ADDRESS,
    F32X16,
    I1X16,
    I8,
    I8X64,
    I16X16,
    I16X32,
    I32,
    I32X16,
    I64,
    I64X8,
    call,
    const,
    load,
    offset,
    shuffle,
    splat,
    store,
    transpose16,
    void,
)  # fmt: skip


def _bf16_of_e4m3(code: int) -> int:
    """bf16 bits of a non-negative e4m3 code (OCP FP8: bias 7, three mantissa bits, 0x7f is NaN)."""
    exponent, mantissa = code >> 3, code & 7
    if code == 0x7F:
        return 0x7FC0
    if exponent == 0:
        if mantissa == 0:
            return 0
        shift = 3 - mantissa.bit_length() + 1
        return ((127 - 6 - shift) << 7) | (((mantissa << shift) & 7) << 4)
    return ((exponent - 7 + 127) << 7) | (mantissa << 4)


_TABLE = tuple(_bf16_of_e4m3(code) for code in range(128))
_LOW, _HIGH = tuple(x & 255 for x in _TABLE), tuple(x >> 8 for x in _TABLE)


def _look_up(b: ir.IRBuilder, codes: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Low and high bytes of the bf16 values of 64 codes: two tables of 128 where the target has VBMI, else four of 16."""
    if "avx512vbmi" not in target_features():
        return _look_up_16(b, codes)
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    low = call(b, name, I8X64, const(I8X64, _LOW[:64]), codes, const(I8X64, _LOW[64:]))
    high = call(b, name, I8X64, const(I8X64, _HIGH[:64]), codes, const(I8X64, _HIGH[64:]))
    return low, b.or_(high, b.and_(codes, const(I8X64, 128)))


def _look_up_16(b: ir.IRBuilder, codes: ir.Value) -> tuple[ir.Value, ir.Value]:
    """``_look_up`` by nibbles. Of a normal code the low byte depends on the low nibble and the high byte on the high one; the
    eight codes without an exponent and NaN are put in afterwards."""

    def table(values: Iterable[int], nibbles: ir.Value) -> ir.Value:
        return call(b, "llvm.x86.avx512.pshuf.b.512", I8X64, const(I8X64, 4 * tuple(values)), nibbles)

    nibble, size = const(I8X64, 15), b.and_(codes, const(I8X64, 127))
    least, most = b.and_(codes, nibble), b.and_(b.lshr(codes, const(I8X64, 4)), const(I8X64, 7))
    low, high = table((_LOW[16 + n] for n in range(16)), least), table(_HIGH[8:127:16] * 2, most)
    small, nan = b.icmp_unsigned("<", size, const(I8X64, 8)), b.icmp_unsigned("==", size, const(I8X64, 127))
    low = b.select(small, table(_LOW[:8] * 2, least), b.select(nan, const(I8X64, _LOW[127]), low))
    high = b.select(small, table(_HIGH[:8] * 2, least), b.select(nan, const(I8X64, _HIGH[127]), high))
    return low, b.or_(high, b.and_(codes, const(I8X64, 128)))


#: in-lane interleave of two 64-byte vectors, first and second half of every 16 bytes
_FIRST = tuple(x for lane in range(4) for e in range(8) for x in (16 * lane + e, 64 + 16 * lane + e))
_SECOND = tuple(x for lane in range(4) for e in range(8) for x in (16 * lane + 8 + e, 64 + 16 * lane + 8 + e))


def decode64(b: ir.IRBuilder, source: ir.Value) -> tuple[ir.Value, ir.Value]:
    """64 consecutive codes -> two vectors of 32 bf16 in order. The quadwords are pre-shuffled so that interleaving restores the
    order."""
    raw = load(b, source, I64X8)
    low, high = _look_up(b, b.bitcast(shuffle(b, raw, raw, (0, 4, 1, 5, 2, 6, 3, 7)), I8X64))
    return b.bitcast(shuffle(b, low, high, _FIRST), I16X32), b.bitcast(shuffle(b, low, high, _SECOND), I16X32)


def _scaled(b: ir.IRBuilder, values: ir.Value, scale: ir.Value) -> ir.Value:
    """32 bf16 times an fp32, rounded to nearest even."""
    halves = []
    for at in (0, 16):
        part = shuffle(b, values, values, range(at, at + 16))
        wide = b.bitcast(b.shl(b.zext(part, I32X16), const(I32X16, 16)), F32X16)
        halves.append(b.trunc(b.lshr(to_bf16(b, b.fmul(wide, scale)), const(I32X16, 16)), I16X16))
    return shuffle(b, halves[0], halves[1], range(32))


def to_bf16(b: ir.IRBuilder, wide: ir.Value) -> ir.Value:
    """fp32 rounded to bf16 (nearest even), as fp32 bits with a zero low half. NaN stays NaN."""
    bits = b.bitcast(wide, I32X16)
    odd = b.and_(b.lshr(bits, const(I32X16, 16)), const(I32X16, 1))
    rounded = b.and_(b.add(bits, b.add(const(I32X16, 0x7FFF), odd)), const(I32X16, 0xFFFF0000))
    return b.select(b.fcmp_unordered("uno", wide, wide), const(I32X16, 0x7FC00000), rounded)


@intrinsic
def decode_codes(typing: Any, source: Any, target: Any) -> Any:
    """64 e4m3 codes at ``source`` -> 64 bf16 at ``target``."""

    def body(b: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        first, second = decode64(b, source)
        store(b, first, target)
        store(b, second, offset(b, target, 64))

    return types.void(ADDRESS, ADDRESS), void(body)


@intrinsic
def decode_scaled(typing: Any, source: Any, target: Any, scale: Any) -> Any:
    """64 e4m3 codes times the fp32 at ``scale``, rounded to bf16."""

    def body(b: ir.IRBuilder, source: ir.Value, target: ir.Value, scale: ir.Value) -> None:
        factor = splat(b, load(b, scale, ir.FloatType()), F32X16)
        for at, part in enumerate(decode64(b, source)):
            store(b, _scaled(b, part, factor), offset(b, target, 64 * at))

    return types.void(ADDRESS, ADDRESS, ADDRESS), void(body)


@intrinsic
def copy64(typing: Any, source: Any, target: Any) -> Any:
    """64 bytes."""
    return types.void(ADDRESS, ADDRESS), void(lambda b, source, target: store(b, load(b, source, I16X32), target))


@intrinsic
def round32(typing: Any, source: Any, target: Any) -> Any:
    """32 fp32 at ``source`` -> 32 bf16 at ``target``."""

    def body(b: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        for at in range(2):
            wide = load(b, offset(b, source, 64 * at), F32X16)
            store(b, b.trunc(b.lshr(to_bf16(b, wide), const(I32X16, 16)), I16X16), offset(b, target, 32 * at))

    return types.void(ADDRESS, ADDRESS), void(body)


def _pack(b: ir.IRBuilder, source: ir.Value, pitch: ir.Value, order: tuple[int, int]) -> list[ir.Value]:
    """Four e4m3 columns of 16 rows, ``pitch`` bytes apart, as two vectors of 16 pairs of bf16; ``order`` of the columns in a
    pair, low half first."""
    rows = b.mul(splat(b, b.trunc(pitch, I32), I32X16), const(I32X16, range(16)))
    base = b.inttoptr(source, I8.as_pointer())
    words = call(b, "llvm.x86.avx512.mask.gather.dpi.512", I32X16, const(I32X16, 0), base, rows, const(I1X16, 1), I32(1))
    return _pairs(b, words, order)


def _pairs(b: ir.IRBuilder, words: ir.Value, order: tuple[int, int]) -> list[ir.Value]:
    """Four columns of codes in each of 16 dwords -> two vectors of 16 pairs of bf16."""
    low, high = _look_up(b, b.bitcast(words, I8X64))
    return [
        shuffle(b, low, high, [x for lane in range(16) for e in order for x in (4 * lane + at + e, 64 + 4 * lane + at + e)])
        for at in (0, 2)
    ]


@intrinsic
def pack_codes(typing: Any, source: Any, pitch: Any, target: Any) -> Any:
    """Four e4m3 columns of 16 rows, ``pitch`` bytes apart, as two rows of a right tile: [2 pairs, 16 rows, 2] bf16 (128
    bytes)."""

    def body(b: ir.IRBuilder, source: ir.Value, pitch: ir.Value, target: ir.Value) -> None:
        for half, pairs in enumerate(_pack(b, source, pitch, (0, 1))):
            store(b, pairs, offset(b, target, 64 * half))

    return types.void(ADDRESS, types.int64, ADDRESS), void(body)


@intrinsic
def pack_high_first(typing: Any, source: Any, pitch: Any, target: Any, step: Any) -> Any:
    """As ``pack_codes``, but the first column of a pair in the high half, and the second pair ``step`` bytes behind the
    first."""

    def body(b: ir.IRBuilder, source: ir.Value, pitch: ir.Value, target: ir.Value, step: ir.Value) -> None:
        first, second = _pack(b, source, pitch, (1, 0))
        store(b, first, target)
        store(b, second, b.add(target, step))

    return types.void(ADDRESS, types.int64, ADDRESS, types.int64), void(body)


@intrinsic
def pack64_high_first(typing: Any, source: Any, pitch: Any, target: Any, step: Any) -> Any:
    """``pack_high_first`` of 64 columns: 32 pairs, ``step`` bytes apart. Rows are loaded whole and transposed: far faster than
    gathers."""

    def body(b: ir.IRBuilder, source: ir.Value, pitch: ir.Value, target: ir.Value, step: ir.Value) -> None:
        rows = [load(b, b.add(source, b.mul(pitch, I64(row))), I32X16) for row in range(16)]
        for words in transpose16(b, rows):
            for pairs in _pairs(b, words, (1, 0)):
                store(b, pairs, target)
                target = b.add(target, step)

    return types.void(ADDRESS, types.int64, ADDRESS, types.int64), void(body)


#: in-lane interleave of two vectors of 32 bf16: columns of a pair of rows, 4 of every 8 at a time
PAIR_LOW = tuple(x for lane in range(4) for e in range(4) for x in (8 * lane + e, 32 + 8 * lane + e))
PAIR_HIGH = tuple(x for lane in range(4) for e in range(4) for x in (8 * lane + 4 + e, 32 + 8 * lane + 4 + e))
#: the column order those interleaves leave in 32 columns: stored column i is true column COLUMN_ORDER[i]
COLUMN_ORDER = tuple(8 * lane + e for lane in range(4) for e in range(4)) + tuple(
    8 * lane + 4 + e for lane in range(4) for e in range(4)
)


@intrinsic
def pair_rows(typing: Any, first: Any, second: Any, target: Any) -> Any:
    """64 bf16 columns of two rows as one row of four right tiles: 256 bytes, columns in COLUMN_ORDER within each 32."""

    def body(b: ir.IRBuilder, first: ir.Value, second: ir.Value, target: ir.Value) -> None:
        for half in range(2):
            x, y = (load(b, offset(b, row, 64 * half), I16X32) for row in (first, second))
            store(b, shuffle(b, x, y, PAIR_LOW), offset(b, target, 128 * half))
            store(b, shuffle(b, x, y, PAIR_HIGH), offset(b, target, 128 * half + 64))

    return types.void(ADDRESS, ADDRESS, ADDRESS), void(body)


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    def body(b: ir.IRBuilder, address: ir.Value) -> None:
        call(b, "llvm.prefetch.p0", ir.VoidType(), b.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1))

    return types.void(ADDRESS), void(body)
