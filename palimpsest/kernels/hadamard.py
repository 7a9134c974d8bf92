"""Hadamard rotation ``x @ H / sqrt(dim)`` of row tiles by butterflies, fp64 inside, one rounding to fp32, zeros are +0."""

import numpy as np
import torch

from palimpsest.core.errors import Unsupported
from palimpsest.kernels.call import Scratch
from palimpsest.kernels.sizes import ROW_TILE


def butterflies(wide: torch.Tensor, half: torch.Tensor) -> None:
    """``wide`` [m, dim] fp64 times the Sylvester-Hadamard matrix, in place; ``half`` is scratch [m, dim/2] fp64."""
    m, dim = wide.shape
    step = 1
    while step < dim:
        view = wide.view(m, dim // (2 * step), 2, step)
        low, high = view[:, :, 0], view[:, :, 1]
        difference = half.view(m, dim // (2 * step), step)
        torch.sub(low, high, out=difference)
        low.add_(high)
        high.copy_(difference)
        step *= 2


class Hadamard:
    """Rotates ``[ROW_TILE, dim]`` fp32 tiles in place (``sizes.hadamard_scratch``). Raises Unsupported unless dim is a power of
    two.
    """

    def __init__(self, scratch: Scratch, dim: int):
        if dim & (dim - 1):
            raise Unsupported(f"the Hadamard rotation needs an index dim that is a power of two, not {dim}")
        self.wide = scratch.take((ROW_TILE, dim), "fp64")
        self.half = scratch.take((ROW_TILE, max(1, dim // 2)), "fp64")
        self.scale = dim**-0.5

    def __call__(self, tile: torch.Tensor) -> None:
        self.wide.copy_(tile)
        butterflies(self.wide, self.half)
        wide = self.wide.numpy()
        np.multiply(wide, self.scale, out=wide)
        np.add(wide, 0.0, out=wide)
        tile.copy_(self.wide)
