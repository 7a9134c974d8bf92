"""Projections ``x @ weight.T`` on AMX: bf16 weights straight from their buffer, fp32 sums in a fixed order (``amx`` engine).

The product is formed transposed, weight rows as left tiles and packed input rows as right tiles, so that the weight is never
repacked. A
result adds 32 elements of the depth at a time, ascending (TDPBF16PS); which tile a row lies in and who its neighbours are
changes nothing, so no padding to a fixed shape and no probe is needed. fp32 input is split in two bf16 parts,
x = high + low + at most 2^-17 |x|, and each step of 32 adds the high part first.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types

from palimpsest.kernels.amx_ir import tile_begin, tile_dot, tile_end, tile_load, tile_store, tile_zero
from palimpsest.kernels.avx512_pack import split16, transpose_block
from palimpsest.kernels.call import Scratch
from palimpsest.kernels.jit import intrinsic, kernel, piece
from palimpsest.kernels.llvm_ir import ADDRESS, load, value
from palimpsest.kernels.sizes import ROW_TILE


@intrinsic
def read_word(typing: Any, address: Any) -> Any:
    """Eight bytes."""
    return types.uint64(ADDRESS), value(lambda b, address: load(b, address, ir.IntType(64), 2))


@kernel("f4[:,::1]", "u2[:,:,::1]")
def split_rows(rows, parts):
    """rows [m, depth] fp32 -> parts [2, m, depth] bf16: high, low."""
    for row in range(rows.shape[0]):
        source, high, low = rows[row].ctypes.data, parts[0, row].ctypes.data, parts[1, row].ctypes.data
        for d in range(0, rows.shape[1], 16):
            split16(source + np.uint64(4 * d), high + np.uint64(2 * d), low + np.uint64(2 * d))


@kernel("u2[:,:,::1]", "u2[:,:,:,:,:,::1]")
def pack_rows(parts, packed):
    """parts [p, 32, depth] bf16 -> packed [steps, p, 2, 16 pairs, 16 rows, 2]."""
    pitch, to = 2 * parts.shape[2], packed.ctypes.data
    for step in range(packed.shape[0]):
        for part in range(parts.shape[0]):
            for half in range(2):
                transpose_block(parts[part, 16 * half].ctypes.data + np.uint64(64 * step), pitch, to, 64)
                to += np.uint64(1024)


@piece
def _multiply(upper, lower, pitch, packed, steps, split, sums):
    """Two tiles of 16 weight rows against 32 packed input rows; sums [4 tiles]: upper and lower weights by first and second
    rows."""
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)
    for _ in range(steps):
        tile_load(4, upper, pitch)
        tile_load(6, packed, 64)
        tile_dot(0, 4, 6)
        tile_load(5, lower, pitch)
        tile_dot(2, 5, 6)
        tile_load(7, packed + np.uint64(1024), 64)
        tile_dot(1, 4, 7)
        tile_dot(3, 5, 7)
        packed += np.uint64(2048)
        if split:
            tile_load(6, packed, 64)
            tile_dot(0, 4, 6)
            tile_dot(2, 5, 6)
            tile_load(7, packed + np.uint64(1024), 64)
            tile_dot(1, 4, 7)
            tile_dot(3, 5, 7)
            packed += np.uint64(2048)
        upper += np.uint64(64)
        lower += np.uint64(64)
    tile_store(0, sums, 64)
    tile_store(1, sums + np.uint64(1024), 64)
    tile_store(2, sums + np.uint64(2048), 64)
    tile_store(3, sums + np.uint64(3072), 64)


@kernel("u8", "i8", "i8", "u2[:,:,:,:,:,::1]", "u2[:,::1]", "f4[::1]", "f4[:,::1]")
def project_rows(weight, pitch, columns, packed, tail, sums, out):
    """out [32, columns] = packed rows @ weight.T; weight rows of ``pitch`` bytes at address ``weight``; tail [32, depth]:
    scratch."""
    steps, split, depth = packed.shape[0], packed.shape[1] == 2, 32 * packed.shape[0]
    rows, row_bytes, total = packed.ctypes.data, 4 * out.shape[1], sums.ctypes.data
    words = tail.view(np.uint64)
    tile_begin()
    for first in range(0, columns, 32):
        count = min(32, columns - first)
        upper, lower, step = weight + np.uint64(first * pitch), weight + np.uint64((first + 16) * pitch), pitch
        if count < 32:
            for i in range(32):
                for d in range(depth // 4):
                    words[i, d] = read_word(weight + np.uint64((first + i) * pitch + 8 * d)) if i < count else np.uint64(0)
            upper, lower, step = tail.ctypes.data, tail[16].ctypes.data, 2 * depth
        _multiply(upper, lower, step, rows, steps, split, total)
        for half in range(2):
            for block in range(2):
                at = total + np.uint64(2048 * block + 1024 * half)
                if count >= 16 * (block + 1):
                    transpose_block(at, 64, out[16 * half].ctypes.data + np.uint64(4 * (first + 16 * block)), row_bytes)
                else:
                    for c in range(count - 16 * block):
                        for r in range(16):
                            out[16 * half + r, first + 16 * block + c] = sums[512 * block + 256 * half + 16 * c + r]
    tile_end()


class AmxProjection:
    """``linear.Projection`` for bf16 weights whose depth is a multiple of 32, on AMX (``sizes.amx_linear_scratch``)."""

    def __init__(self, scratch: Scratch, depth: int, columns: int, *, resident: bool = False):
        self.depth, self.columns = depth, columns
        self.wide = scratch.take((ROW_TILE, depth), "fp32")
        self.parts = scratch.take((2, ROW_TILE, depth), "bf16")
        packed = scratch.take((2 * 2 * ROW_TILE * depth,), "u8").numpy().view(np.uint16)
        self.packed = [packed[: parts * ROW_TILE * depth].reshape(depth // 32, parts, 2, 16, 16, 2) for parts in (1, 2)]
        self.tail = scratch.take((32, 2 * depth), "u8").numpy().view(np.uint16)
        self.sums = scratch.take((1024,), "fp32").numpy()
        self.kept = scratch.take((columns, depth), "bf16") if resident else None
        self.weight: torch.Tensor | None = None

    def load(self, weight: torch.Tensor) -> None:
        """Use ``weight`` [columns, depth] bf16: where it is when its rows are dense, else as a resident copy."""
        self.weight = weight
        if weight.stride(1) != 1:
            assert self.kept is not None, "a weight with strided rows needs resident scratch"
            # torch allocates a block to turn a matrix of one dtype
            np.copyto(_bits(self.kept), _bits(weight))
            self.weight = self.kept

    def apply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` [ROW_TILE, columns] fp32 = ``rows`` [<= ROW_TILE, depth] bf16 or fp32 @ loaded.T; rows past the given ones
        come out zero."""
        assert self.weight is not None
        count = rows.shape[0]
        split = rows.dtype != torch.bfloat16
        if split:
            self.wide[:count].copy_(rows)
            self.wide[count:].zero_()
            split_rows(self.wide.numpy(), _bits(self.parts))
        else:
            self.parts[0, :count].copy_(rows)
            self.parts[0, count:].zero_()
        packed = self.packed[split]
        pack_rows(_bits(self.parts)[: packed.shape[1]], packed)
        project_rows(self.weight.data_ptr(), 2 * self.weight.stride(0), self.columns, packed, self.tail, self.sums, out.numpy())

    def project(self, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """``load`` and ``apply``."""
        self.load(weight)
        self.apply(rows, out)


def _bits(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.int16).numpy().view(np.uint16)
