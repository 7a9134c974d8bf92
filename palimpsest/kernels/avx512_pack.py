"""Input rows of a projection as operands: tiles of 16 rows transposed, fp32 split in two bf16 parts (``amx`` and ``avx512``
engines). Needs AVX512 alone."""

from typing import Any

from llvmlite import ir
from numba.core import types

from palimpsest.kernels.avx512_decode import to_bf16
from palimpsest.kernels.jit import intrinsic
from palimpsest.kernels.llvm_ir import (
    ADDRESS,
    F32X16,
    I16X16,
    I32X16,
    I64,
    const,
    load,
    offset,
    shuffle,
    store,
    transpose16,
    void,
)  # fmt: skip


def _store_columns(b: ir.IRBuilder, rows: list[ir.Value], target: ir.Value, pitch: ir.Value) -> None:
    for i, column in enumerate(transpose16(b, rows)):
        store(b, column, b.add(target, b.mul(pitch, I64(i))))


@intrinsic
def transpose_block(typing: Any, source: Any, source_pitch: Any, target: Any, target_pitch: Any) -> Any:
    """16 rows of 16 dwords, transposed. Pitches in bytes."""

    def body(b: ir.IRBuilder, source: ir.Value, source_pitch: ir.Value, target: ir.Value, target_pitch: ir.Value) -> None:
        rows = [load(b, b.add(source, b.mul(source_pitch, I64(i))), I32X16) for i in range(16)]
        _store_columns(b, rows, target, target_pitch)

    return types.void(ADDRESS, types.int64, ADDRESS, types.int64), void(body)


def _split(b: ir.IRBuilder, source: ir.Value) -> tuple[ir.Value, ir.Value]:
    """16 fp32 -> bf16 high and low parts; low is zero where high is not finite."""
    wide = load(b, source, F32X16)
    top = to_bf16(b, wide)
    rest = b.fsub(wide, b.bitcast(top, F32X16))
    finite = b.icmp_unsigned("<", b.and_(top, const(I32X16, 0x7FFFFFFF)), const(I32X16, 0x7F800000))
    bottom = b.select(finite, to_bf16(b, rest), const(I32X16, 0))
    high, low = (b.trunc(b.lshr(bits, const(I32X16, 16)), I16X16) for bits in (top, bottom))
    return high, low


@intrinsic
def split16(typing: Any, source: Any, high: Any, low: Any) -> Any:
    """16 fp32 -> bf16 high and low parts; low is zero where high is not finite."""

    def body(b: ir.IRBuilder, source: ir.Value, high: ir.Value, low: ir.Value) -> None:
        for part, to in zip(_split(b, source), (high, low), strict=True):
            store(b, part, to)

    return types.void(ADDRESS, ADDRESS, ADDRESS), void(body)


@intrinsic
def split_block(typing: Any, source: Any, source_pitch: Any, high: Any, low: Any, target_pitch: Any) -> Any:
    """16 rows of 32 fp32 -> bf16 high and low parts as pairs, each part 16 rows of 16 pairs, transposed. Pitches in bytes."""

    def body(b: ir.IRBuilder, source: ir.Value, source_pitch: ir.Value, high: ir.Value, low: ir.Value, pitch: ir.Value) -> None:
        parts: list[list[ir.Value]] = [[], []]
        for i in range(16):
            row = b.add(source, b.mul(source_pitch, I64(i)))
            for part, x, y in zip(parts, _split(b, row), _split(b, offset(b, row, 64)), strict=True):
                part.append(b.bitcast(shuffle(b, x, y, range(32)), I32X16))
        for part, to in zip(parts, (high, low), strict=True):
            _store_columns(b, part, to, pitch)

    return types.void(ADDRESS, types.int64, ADDRESS, ADDRESS, types.int64), void(body)
