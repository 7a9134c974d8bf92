"""LLVM from numba: how the ``amx`` engine writes instructions that Python has no word for, and the AMX tile instructions
themselves.

Addresses are plain integers (``types.uintp``); nothing here checks a bound. Tile numbers are literals 0..7, every tile is 16
rows of 64 bytes.
Import only where ``detect`` offers ``amx``: compiling these for another target ends the process.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from palimpsest.kernels.jit import intrinsic

I1, I8, I16, I32, I64, F32 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
F32X16, I32X16, I1X16, I16X16 = (ir.VectorType(t, 16) for t in (F32, I32, I1, I16))
I8X16, I8X64, I16X32, I64X8 = ir.VectorType(I8, 16), ir.VectorType(I8, 64), ir.VectorType(I16, 32), ir.VectorType(I64, 8)
ADDRESS = types.uintp


def const(kind: ir.Type, values: Sequence[float] | float) -> ir.Constant:
    """A vector constant; a number fills every lane."""
    return ir.Constant(kind, list(values) if isinstance(values, Sequence) else [values] * kind.count)


def load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=align)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 1) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=align)


def offset(b: ir.IRBuilder, base: ir.Value, count: int) -> ir.Value:
    return b.add(base, I64(count)) if count else base


def shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
    return b.shuffle_vector(x, y, const(ir.VectorType(I32, len(lanes)), list(lanes)))


def splat(b: ir.IRBuilder, value: ir.Value, kind: ir.Type) -> ir.Value:
    empty = ir.Constant(kind, ir.Undefined)
    return b.shuffle_vector(b.insert_element(empty, value, I32(0)), empty, const(ir.VectorType(I32, kind.count), 0))


def call(b: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return b.call(function, arguments)


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return call(b, "llvm.fma.v16f32", F32X16, x, y, z)


def transpose16(b: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """16 x 16 dwords."""
    for width in (1, 2, 4, 8):
        low = [x for at in range(0, 16, 2 * width) for base in (0, 16) for x in range(base + at, base + at + width)]
        high = [x + width for x in low]
        out = list(rows)
        for i in range(16):
            if not (i // width) & 1:
                out[i] = shuffle(b, rows[i], rows[i + width], low)
                out[i + width] = shuffle(b, rows[i], rows[i + width], high)
        rows = out
    return rows


def count_lanes(b: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    """Set lanes of a 16-lane mask as i64."""
    return b.zext(call(b, "llvm.ctpop.i16", I16, b.bitcast(mask, I16)), I64)


def compress(b: ir.IRBuilder, values: ir.Value, mask: ir.Value) -> ir.Value:
    """Masked i32 lanes moved to the front, zeros behind."""
    return call(b, "llvm.x86.avx512.mask.compress.v16i32", I32X16, values, const(I32X16, 0), mask)


def void(body: Callable[..., None]) -> Callable[..., Any]:
    """A code generator that returns nothing, from ``body(builder, *arguments)``."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        body(builder, *arguments)
        return context.get_dummy_value()

    return generate


def value(body: Callable[..., ir.Value]) -> Callable[..., Any]:
    """A code generator that returns what ``body(builder, *arguments)`` returns."""
    return lambda context, builder, signature, arguments: body(builder, *arguments)


def _literals(*given: Any) -> list[int]:
    return [one.literal_value for one in given]


def _tile_config(b: ir.IRBuilder) -> None:
    """Palette 1, eight tiles of 16 rows of 64 bytes."""
    table = [0] * 64
    table[0] = 1
    for tile in range(8):
        table[16 + 2 * tile], table[48 + tile] = 64, 16
    slot = cgutils.alloca_once(b, ir.ArrayType(I8, 64))
    b.store(ir.Constant(ir.ArrayType(I8, 64), bytearray(table)), slot)
    call(b, "llvm.x86.ldtilecfg", ir.VoidType(), b.bitcast(slot, I8.as_pointer()))


@intrinsic
def tile_begin(typing: Any) -> Any:
    """Configure the tiles of this thread."""
    return types.void(), void(_tile_config)


@intrinsic
def tile_end(typing: Any) -> Any:
    """Give the tiles back; until then every context switch carries 8 KiB."""
    return types.void(), void(lambda b: call(b, "llvm.x86.tilerelease", ir.VoidType()))


@intrinsic(prefer_literal=True)
def tile_zero(typing: Any, tile: Any) -> Any:
    (number,) = _literals(tile)
    return types.void(tile), void(lambda b, _: call(b, "llvm.x86.tilezero", ir.VoidType(), I8(number)))


def _tile_move(name: str, tile: Any) -> Any:
    (number,) = _literals(tile)

    def body(b: ir.IRBuilder, _: ir.Value, address: ir.Value, stride: ir.Value) -> None:
        call(b, name, ir.VoidType(), I8(number), b.inttoptr(address, I8.as_pointer()), stride)

    return types.void(tile, ADDRESS, types.int64), void(body)


@intrinsic(prefer_literal=True)
def tile_load(typing: Any, tile: Any, address: Any, stride: Any) -> Any:
    """16 rows of 64 bytes, ``stride`` bytes apart."""
    return _tile_move("llvm.x86.tileloadd64", tile)


@intrinsic(prefer_literal=True)
def tile_store(typing: Any, tile: Any, address: Any, stride: Any) -> Any:
    return _tile_move("llvm.x86.tilestored64", tile)


@intrinsic(prefer_literal=True)
def tile_dot(typing: Any, total: Any, left: Any, right: Any) -> Any:
    """total[16,16] fp32 += left[16,32] bf16 @ right, right holding pairs of rows: [16 pairs, 16 columns, 2]."""
    numbers = [I8(one) for one in _literals(total, left, right)]
    return types.void(total, left, right), void(lambda b, *_: call(b, "llvm.x86.tdpbf16ps", ir.VoidType(), *numbers))
