"""Projections ``x @ weight.T`` with VDPBF16PS (``avx512`` engine): bf16 weights straight from their buffer, fp32 sums in a fixed
order.

A lane is an input row: rows are packed once per tile as pairs of bf16, each pair of a weight row is broadcast from where it is
stored, and the sums of 12 weight rows with 32 inputs (6 when inputs are split) stay in registers over ``DEPTH_BLOCK`` elements.
No lane sees another, so which tile a row lies in and who its neighbours are changes nothing. fp32 input is split in two bf16
parts, x = high + low + at most 2^-17 |x|; each has a chain of its own. The order of roundings is ``emulate.avx512_project``; that
of VDPBF16PS is the machine's, so a seeded tile is compared with it when this file is imported.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types

from palimpsest.core.errors import Unavailable
from palimpsest.kernels import emulate, sizes
from palimpsest.kernels.avx512_decode import prefetch
from palimpsest.kernels.avx512_pack import split_block, transpose_block
from palimpsest.kernels.call import Scratch
from palimpsest.kernels.jit import intrinsic, kernel, piece
from palimpsest.kernels.llvm_ir import ADDRESS, BF16X32, F32X16, I32, I32X16, I64, call, const, load, offset, splat, store, void
from palimpsest.kernels.sizes import DEPTH_BLOCK, PROJECT_COLUMNS, ROW_TILE


def _chains(columns: int, vectors: int) -> Callable[..., None]:
    """Chains of ``columns`` weight rows with ``vectors`` vectors of inputs, from +0; high and low parts join, then the total."""

    def body(b: ir.IRBuilder, *operands: ir.Value) -> None:
        weight, pitch, rows, pairs, total = operands[-5:]
        twice = b.shl(pitch, I64(1))
        down = [I64(0), pitch, twice, b.add(twice, pitch)]
        starts = [rows, *(b.add(weight, b.mul(pitch, I64(c))) for c in range(0, columns, 4))]
        before, loop, after = b.block, b.append_basic_block("pairs"), b.append_basic_block("summed")
        b.branch(loop)
        b.position_at_end(loop)
        left, at = b.phi(I64), [b.phi(I64) for _ in starts]
        chains = [b.phi(F32X16) for _ in range(columns * vectors)]
        inputs = [b.bitcast(load(b, offset(b, at[0], 64 * n), I32X16, 64), BF16X32) for n in range(vectors)]
        added = []
        for c in range(columns):
            pair = splat(b, load(b, b.add(at[1 + c // 4], down[c % 4]), I32, 2), I32X16)
            for n, one in enumerate(inputs):
                chain = chains[c * vectors + n]
                added.append(call(b, "llvm.x86.avx512bf16.dpbf16ps.512", F32X16, chain, one, b.bitcast(pair, BF16X32)))
        steps = [I64(-1), I64(64 * vectors), *[I64(4)] * (len(starts) - 1)]
        following = [b.add(phi, step) for phi, step in zip((left, *at), steps, strict=True)]
        for phi, start, step in zip((left, *at), (pairs, *starts), following, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(step, loop)
        for phi, chain in zip(chains, added, strict=True):
            phi.add_incoming(const(F32X16, 0.0), before)
            phi.add_incoming(chain, loop)
        b.cbranch(b.icmp_signed(">", following[0], I64(0)), loop, after)
        b.position_at_end(after)
        for c in range(columns):
            for half in range(2):
                chain, to = added[c * vectors + half], offset(b, total, 128 * c + 64 * half)
                if vectors == 4:
                    chain = b.fadd(chain, added[c * vectors + half + 2])
                store(b, b.fadd(load(b, to, F32X16, 64), chain), to, 64)

    return body


@intrinsic(prefer_literal=True)
def add_columns(typing: Any, columns: Any, vectors: Any, weight: Any, pitch: Any, rows: Any, pairs: Any, total: Any) -> Any:
    """total [columns, 32] += one block of the depth: ``columns`` weight rows of ``pitch`` bytes at ``weight`` times packed
    ``rows`` [pairs, vectors, 16]; ``vectors`` is 2, or 4 with the low parts behind the high ones."""
    numbers = ADDRESS, types.int64, ADDRESS, types.int64, ADDRESS
    return types.void(columns, vectors, *numbers), void(_chains(columns.literal_value, vectors.literal_value))


@kernel("u8", "i8", "i4[:,:,::1]")
def pack_rows(rows, pitch, packed):
    """32 bf16 rows of ``pitch`` bytes at address ``rows`` -> packed [pairs, 2, 16 rows]."""
    for half in range(2):
        source, to = rows + np.uint64(16 * half * pitch), packed[0, half].ctypes.data
        for pair in range(0, packed.shape[0], 16):
            transpose_block(source + np.uint64(4 * pair), pitch, to + np.uint64(128 * pair), 128)


@kernel("u8", "i8", "i4[:,:,::1]")
def pack_split(rows, pitch, packed):
    """32 fp32 rows -> packed [pairs, 4, 16 rows]: high parts, low parts."""
    for half in range(2):
        source, high, low = rows + np.uint64(16 * half * pitch), packed[0, half].ctypes.data, packed[0, 2 + half].ctypes.data
        for pair in range(0, packed.shape[0], 16):
            at = np.uint64(256 * pair)
            split_block(source + np.uint64(8 * pair), pitch, high + at, low + at, 256)


@piece
def _ask_for(weight, pitch, columns, pairs):
    """Prefetch one block of ``columns`` weight rows."""
    for _ in range(columns):
        for at in range(0, 4 * pairs, 64):
            prefetch(weight + np.uint64(at))
        weight += np.uint64(pitch)


@piece
def _add_block(weight, pitch, count, rows, pairs, split, sums, ahead):
    """sums [count, 32] += one block of the depth. ahead: prefetch the next group's weight rows, which short runs hide from the
    machine's own prefetcher."""
    total, done, group = sums.ctypes.data, 0, 6 if split else 12
    while done < count:
        left, taken = count - done, 1
        if ahead:
            _ask_for(weight + np.uint64(group * pitch), pitch, group, pairs)
        if split:
            if left >= 6:
                taken = 6
                add_columns(6, 4, weight, pitch, rows, pairs, total)
            elif left >= 2:
                taken = 2
                add_columns(2, 4, weight, pitch, rows, pairs, total)
            else:
                add_columns(1, 4, weight, pitch, rows, pairs, total)
        elif left >= 12:
            taken = 12
            add_columns(12, 2, weight, pitch, rows, pairs, total)
        elif left >= 4:
            taken = 4
            add_columns(4, 2, weight, pitch, rows, pairs, total)
        else:
            add_columns(1, 2, weight, pitch, rows, pairs, total)
        done += taken
        weight += np.uint64(taken * pitch)
        total += np.uint64(128 * taken)


@kernel("u8", "i8", "i8", "i4[:,:,::1]", "f4[:,::1]", "f4[:,::1]")
def project_rows(weight, pitch, columns, packed, sums, out):
    """out [32, columns] = packed rows @ weight.T; weight rows of ``pitch`` bytes at address ``weight``."""
    split, step = packed.shape[1] == 4, DEPTH_BLOCK // 2
    for first in range(0, columns, PROJECT_COLUMNS):
        count = min(PROJECT_COLUMNS, columns - first)
        for c in range(count):
            for r in range(32):
                sums[c, r] = 0
        start = weight + np.uint64(first * pitch)
        for block in range(0, packed.shape[0], step):
            pairs = min(step, packed.shape[0] - block)
            at, rows = start + np.uint64(4 * block), packed[block].ctypes.data
            _add_block(at, pitch, count, rows, pairs, split, sums, packed.shape[0] <= step)
        for c in range(0, count, 16):
            if count - c >= 16:
                for half in range(2):
                    source, to = sums[c].ctypes.data + np.uint64(64 * half), out[16 * half].ctypes.data
                    transpose_block(source, 128, to + np.uint64(4 * (first + c)), 4 * out.shape[1])
            else:
                for r in range(32):
                    for last in range(c, count):
                        out[r, first + last] = sums[last, r]


class Avx512Projection:
    """``linear.Projection`` for bf16 weights whose depth is a multiple of 32, by VDPBF16PS (``sizes.avx512_linear_scratch``)."""

    def __init__(self, scratch: Scratch, depth: int, columns: int, *, resident: bool = False):
        self.columns = columns
        self.wide = scratch.take((ROW_TILE, depth), "fp32")
        self.half = self.wide.view(torch.bfloat16)[:, :depth]
        packed = scratch.take((depth // 2 * 4 * 16,), "i32").numpy()
        self.packed = [packed[: depth // 2 * vectors * 16].reshape(depth // 2, vectors, 16) for vectors in (2, 4)]
        self.sums = scratch.take((PROJECT_COLUMNS, ROW_TILE), "fp32").numpy()
        self.kept = scratch.take((columns, depth), "bf16") if resident else None
        self.weight: torch.Tensor | None = None

    def load(self, weight: torch.Tensor) -> None:
        """Use ``weight`` [columns, depth] bf16: where it is when its rows are dense, else as a resident copy."""
        self.weight = weight
        if weight.stride(1) != 1:
            assert self.kept is not None, "a weight with strided rows needs resident scratch"
            # torch allocates a block to turn a matrix of one dtype
            np.copyto(self.kept.view(torch.int16).numpy(), weight.view(torch.int16).numpy())
            self.weight = self.kept

    def apply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` [ROW_TILE, columns] fp32 = ``rows`` [<= ROW_TILE, depth] bf16 or fp32 @ loaded.T; rows past the given ones
        come out zero."""
        assert self.weight is not None
        count, split = rows.shape[0], rows.dtype != torch.bfloat16
        if count < ROW_TILE or rows.stride(1) != 1:
            staged = self.wide if split else self.half
            staged[:count].copy_(rows)
            staged[count:].zero_()
            rows = staged
        packed = self.packed[split]
        (pack_split if split else pack_rows)(rows.data_ptr(), rows.element_size() * rows.stride(0), packed)
        project_rows(self.weight.data_ptr(), 2 * self.weight.stride(0), self.columns, packed, self.sums, out.numpy())

    def project(self, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """``load`` and ``apply``."""
        self.load(weight)
        self.apply(rows, out)


def probe_tile() -> tuple[np.ndarray, np.ndarray]:
    """Seeded fp32 rows [2, 544] and a bf16 weight [7, 544] whose sums round at every step; two blocks of the depth."""
    drawn = np.random.default_rng(22).standard_normal((2 + 7, DEPTH_BLOCK + 32), np.float32)
    return drawn[:2], emulate.to_bf16(drawn[2:])


def product_of(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What the kernel makes of a few fp32 rows and a weight of bf16 values."""
    columns, depth = weight.shape
    raw = torch.empty(sizes.avx512_linear_scratch(depth, columns) + 64, dtype=torch.uint8)
    out = torch.empty(ROW_TILE, columns)
    projection = Avx512Projection(Scratch(raw[-raw.data_ptr() % 64 :]), depth, columns)
    projection.project(torch.from_numpy(rows), torch.from_numpy(weight).bfloat16(), out)
    return out.numpy()[: len(rows)]


def check_roundings(product: Callable[[np.ndarray, np.ndarray], np.ndarray] = product_of) -> None:
    """Raises Unavailable where the probe tile's product is not that of ``emulate``, bit for bit."""
    rows, weight = probe_tile()
    wrong = product(rows, weight).view(np.int32) != emulate.avx512_project(rows, weight, split=True).view(np.int32)
    if wrong.any():
        raise Unavailable(
            f"engine avx512 does not run here: {wrong.sum()} of {wrong.size} numbers of a probe projection differ from avx512-1, "
            "so this machine's VDPBF16PS rounds in another order; choose engine avx or portable"
        )


check_roundings()
