"""The AMX tile instructions.

Addresses are plain integers (``types.uintp``); nothing here checks a bound. Tile numbers are literals 0..7, every tile is 16
rows of 64 bytes.
Import only where ``detect`` offers ``amx``: compiling these for another target ends the process.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from palimpsest.kernels.jit import intrinsic
from palimpsest.kernels.llvm_ir import ADDRESS, I8, call, void


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
