"""Fixed-tile projections: ``x @ weight.T`` whose bits per row depend on that row and the weight alone.

Every GEMM has the same shape whatever the number of rows: ``[ROW_TILE, depth] x [depth, columns]`` in fp32, short tiles padded
with zero rows, weight columns cut at absolute multiples of ``COLUMN_TILE``. BLAS then gives a row the same bits at every place of
the tile; ``probe_row_invariance`` checks exactly that on this machine, because no BLAS promises it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from palimpsest.core.errors import Unavailable
from palimpsest.kernels.call import TORCH_DTYPES, Call, Scratch
from palimpsest.kernels.sizes import AMX_ENGINES, COLUMN_TILE, ROW_TILE

if TYPE_CHECKING:
    from palimpsest.kernels.amx_linear import AmxProjection
    from palimpsest.kernels.avx512_linear import Avx512Projection

#: (dtype, rows, depth, columns) of one GEMM ``[rows, depth] x [columns, depth].T``
Gemm = tuple[str, int, int, int]


def row_tiles(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """``(first, end)`` of consecutive tiles of at most ``ROW_TILE`` rows."""
    for first in range(start, stop, ROW_TILE):
        yield first, min(first + ROW_TILE, stop)


def gemms(depth: int, columns: int) -> list[Gemm]:
    """The GEMM shapes ``Projection`` uses for a weight of ``[columns, depth]``."""
    widths = {min(COLUMN_TILE, columns - at) for at in range(0, columns, COLUMN_TILE)}
    return [("fp32", ROW_TILE, depth, width) for width in sorted(widths)]


class Projection:
    """Tiles of one projection, carved from scratch (``sizes.linear_scratch``).

    ``load`` then ``apply`` keeps one whole weight resident over many row tiles; ``project`` streams the weight's column blocks
    instead."""

    def __init__(self, scratch: Scratch, depth: int, columns: int, *, resident: bool = False):
        tile = min(columns, COLUMN_TILE)
        self.input = scratch.take((ROW_TILE, depth), "fp32")
        self.weight = scratch.take((columns if resident else tile, depth), "fp32")
        self.output = scratch.take((ROW_TILE * tile,), "fp32")
        self.columns = columns

    def load(self, weight: torch.Tensor) -> None:
        """Keep ``weight`` [columns, depth], upcast to fp32; any strides."""
        self.weight.copy_(weight)

    def apply(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` [ROW_TILE, columns] fp32 = ``rows`` [<= ROW_TILE, depth] @ loaded.T; rows past the given ones come out zero."""
        self._fill(rows)
        for first in range(0, self.columns, COLUMN_TILE):
            self._multiply(self.weight[first : min(first + COLUMN_TILE, self.columns)], first, out)

    def project(self, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` [ROW_TILE, columns] fp32 = ``rows`` [<= ROW_TILE, depth] @ ``weight`` [columns, depth].T"""
        self._fill(rows)
        for first in range(0, self.columns, COLUMN_TILE):
            end = min(first + COLUMN_TILE, self.columns)
            self._multiply(self.weight[: end - first].copy_(weight[first:end]), first, out)

    def _fill(self, rows: torch.Tensor) -> None:
        self.input[: rows.shape[0]].copy_(rows)
        self.input[rows.shape[0] :].zero_()

    def _multiply(self, block: torch.Tensor, first: int, out: torch.Tensor) -> None:
        width = block.shape[0]
        tile = self.output[: ROW_TILE * width].view(ROW_TILE, width)
        torch.mm(self.input, block.t(), out=tile)
        # whether a sum of zeros is -0 is up to the BLAS; +0.0 makes it +0 everywhere
        np.add(tile.numpy(), np.float32(0), out=tile.numpy())
        out[:, first : first + width].copy_(tile)


def make_projection(
    call: Call, weight: torch.Tensor, depth: int, columns: int, *, resident: bool = False
) -> "Projection | AmxProjection | Avx512Projection":
    """The projection of the call's engine for weights like ``weight``, carved from the call's scratch."""
    engine, takes = call.params.get("engine"), weight.dtype == torch.bfloat16 and depth % 32 == 0
    if engine == "avx512" and takes:
        from palimpsest.kernels.avx512_linear import Avx512Projection

        return Avx512Projection(call.scratch, depth, columns, resident=resident)
    if engine in AMX_ENGINES and takes:
        from palimpsest.kernels.amx_linear import AmxProjection

        return AmxProjection(call.scratch, depth, columns, resident=resident)
    return Projection(call.scratch, depth, columns, resident=resident)


def probe_row_invariance(shapes: Iterable[Gemm]) -> int:
    """Check that each GEMM gives a row the same bytes at every place of the tile and beside any neighbours; returns the shapes
    tried.

    Run at prepare (it allocates). Raises Unavailable naming the shape when this machine's BLAS does not: then the engine cannot
    keep its promise that results do not depend on chunks, tiles and ranks."""
    tried = sorted(set(shapes))
    generator = torch.Generator().manual_seed(20)
    for dtype, rows, depth, columns in tried:
        kind = TORCH_DTYPES[dtype]
        left = torch.randn(rows, depth, generator=generator, dtype=kind)
        right = torch.randn(columns, depth, generator=generator, dtype=kind)
        expected, found = torch.mm(left, right.t()), torch.empty(rows, columns, dtype=kind)
        for shift in range(1, rows):
            torch.mm(left.roll(shift, 0), right.t(), out=found)
            if not torch.equal(found, expected.roll(shift, 0)):
                raise _refusal(dtype, rows, depth, columns, f"row bits change when rows move by {shift}")
        alone = torch.full_like(left, torch.nan)
        alone[0] = left[0]
        if not torch.equal(torch.mm(alone, right.t())[0], expected[0]):
            raise _refusal(dtype, rows, depth, columns, "a row's bits depend on its neighbours")
    return len(tried)


def _refusal(dtype: str, rows: int, depth: int, columns: int, what: str) -> Unavailable:
    return Unavailable(
        f"the portable engine needs a BLAS whose rows do not influence each other; here the {dtype} GEMM "
        f"[{rows},{depth}] x [{depth},{columns}] fails: {what}. Use one torch thread per rank, or another torch build"
    )
