"""AMX tile instructions in plain loops, so that the ``amx`` engine's own code runs on a CPU without them: slowly, and bit for bit
as ``emulate.amx_dot`` says but for the flushing of subnormals.

``install`` must come before any amx module is imported, in a process of its own; its machine code is never kept. AVX512 has to be
real.
"""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, register_jitable

from palimpsest.kernels import amx_ir, detect, jit

#: eight tiles of 16 rows of 64 bytes
TILES = np.zeros((8, 1024), np.uint8)
BASE = np.uint64(TILES.ctypes.data)


@intrinsic
def _pointer(typing, address):
    return types.voidptr(types.uint64), lambda context, b, signature, args: b.inttoptr(args[0], ir.IntType(8).as_pointer())


@register_jitable
def _row(address):
    return carray(_pointer(np.uint64(address)), 64, np.uint8)


@register_jitable
def _tile_row(tile, row):
    return _row(BASE + np.uint64(1024 * tile + 64 * row))


@register_jitable
def tile_begin():
    pass


@register_jitable
def tile_end():
    pass


@register_jitable
def tile_zero(tile):
    for row in range(16):
        _tile_row(tile, row)[:] = 0


@register_jitable
def tile_load(tile, address, stride):
    for row in range(16):
        to, source = _tile_row(tile, row), _row(np.uint64(address) + np.uint64(row * np.int64(stride)))
        for i in range(64):
            to[i] = source[i]


@register_jitable
def tile_store(tile, address, stride):
    for row in range(16):
        source, to = _tile_row(tile, row), _row(np.uint64(address) + np.uint64(row * np.int64(stride)))
        for i in range(64):
            to[i] = source[i]


@register_jitable
def tile_dot(total, left, right):
    """One step of TDPBF16PS: a chain over the even and one over the odd elements, their sum added to the total."""
    sums = carray(_pointer(BASE + np.uint64(1024 * total)), (16, 16), np.float32)
    a = carray(_pointer(BASE + np.uint64(1024 * left)), (16, 32), np.uint16)
    b = carray(_pointer(BASE + np.uint64(1024 * right)), (16, 16, 2), np.uint16)
    bits = np.zeros(2, np.uint32)
    values = bits.view(np.float32)
    for m in range(16):
        for n in range(16):
            chains = np.zeros(2, np.float32)
            for k in range(16):
                for parity in range(2):
                    bits[0], bits[1] = np.uint32(a[m, 2 * k + parity]) << 16, np.uint32(b[k, n, parity]) << 16
                    chains[parity] += values[0] * values[1]
            sums[m, n] += chains[0] + chains[1]


def _uncached(function):
    raise RuntimeError("code with simulated tiles is never kept")


def install() -> None:
    """Put the loops in the instructions' place and let ``detect`` offer ``amx``."""
    for one in (tile_begin, tile_end, tile_zero, tile_load, tile_store, tile_dot):
        setattr(amx_ir, one.__name__, one)
    features = detect.target_features() | frozenset(detect.AMX_FEATURES)
    detect.request_tiles = lambda: ""
    detect.target_features = lambda: features
    jit._StampedCache = _uncached
