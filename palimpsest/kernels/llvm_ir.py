"""LLVM from numba: how the compiled engines write instructions that Python has no word for.

Addresses are plain integers (``types.uintp``); nothing here checks a bound. Import a file whose intrinsics name an instruction
only where ``detect`` has found it in the compile target: compiling it for another ends the process.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

I1, I8, I16, I32, I64, F32 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
F32X16, I32X16, I1X16, I16X16 = (ir.VectorType(t, 16) for t in (F32, I32, I1, I16))
I8X16, I8X64, I16X32, I64X8 = ir.VectorType(I8, 16), ir.VectorType(I8, 64), ir.VectorType(I16, 32), ir.VectorType(I64, 8)
ADDRESS = types.uintp


class _Bfloat32(ir.Type):
    """<32 x bfloat>, which llvmlite has no word for: bitcast to and from it, nothing else."""

    def _to_string(self) -> str:
        return "<32 x bfloat>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat32)

    def __hash__(self) -> int:
        return hash(_Bfloat32)


BF16X32 = _Bfloat32()


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
