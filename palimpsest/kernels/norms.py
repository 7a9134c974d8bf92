"""RMS and layer norm of row tiles: fp64 inside, one rounding to fp32, always over the same tile shape."""

import numpy as np
import torch

from palimpsest.kernels.call import Scratch
from palimpsest.kernels.sizes import ROW_TILE


class RowNorm:
    """Norm of ``[ROW_TILE, width]`` fp32 tiles in place (``sizes.norm_scratch``).

    rms:   ``x / sqrt(mean(x^2) + eps) * weight``
    layer: ``(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias`` when a bias is given
    """

    def __init__(self, scratch: Scratch, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None):
        width = weight.shape[0]
        self.eps, self.width = eps, width
        self.wide = scratch.take((ROW_TILE, width), "fp64")
        self.square = scratch.take((ROW_TILE, width), "fp64")
        self.mean = scratch.take((ROW_TILE, 1), "fp64")
        self.weight = scratch.take((width,), "fp64").copy_(weight)
        self.bias = None if bias is None else scratch.take((width,), "fp64").copy_(bias)

    def __call__(self, tile: torch.Tensor) -> None:
        """Norm ``tile`` [ROW_TILE, width] fp32 in place; its rows may be strided."""
        wide, mean = self.wide, self.mean
        column = mean.numpy()
        wide.copy_(tile)
        if self.bias is not None:
            torch.sum(wide, 1, keepdim=True, out=mean)
            np.divide(column, self.width, out=column)
            wide.sub_(mean)
        torch.mul(wide, wide, out=self.square)
        torch.sum(self.square, 1, keepdim=True, out=mean)
        np.divide(column, self.width, out=column)
        np.add(column, self.eps, out=column)
        np.sqrt(column, out=column)
        wide.div_(mean).mul_(self.weight)
        if self.bias is not None:
            wide.add_(self.bias)
        tile.copy_(wide)
