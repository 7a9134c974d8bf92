"""Exact scores of rows whose numbers are small and whole, by torch's bf16 GEMM: sums of small whole numbers do not round.

What K5 compares every lattice row with. Whatever might round is refused here and scored in fp64 instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from palimpsest.prove.exact import E4M3_VALUES, IndexRow

#: whole numbers up to here are exact in bf16 and in fp32; so is every sum of them that stays below, in any order
WHOLE_BF16, WHOLE_FP32 = 2**8, 2**24
#: keys multiplied at once
KEYS = 2048

_VALUES = torch.from_numpy(E4M3_VALUES.astype(np.float32)).bfloat16()


@dataclass(frozen=True)
class Lattice:
    """Several rows.

    query: [rows * heads, dim] bf16; weights: [rows, 1, heads] fp32; widest: the largest |q|; mass: the largest sum of |weight|
    """

    query: torch.Tensor
    weights: torch.Tensor
    widest: float
    mass: float

    @staticmethod
    def of(rows: Sequence[IndexRow]) -> "Lattice | None":
        """None when there is no row, or one that is not made of small whole numbers."""
        if not rows or any(row.format != "fp8" or not _whole(row.query) or not _whole(row.weights) for row in rows):
            return None
        query, weights = np.concatenate([row.query for row in rows]), np.stack([row.weights for row in rows])
        widest, mass = float(np.abs(query).max(initial=0)), float(np.abs(weights.astype(np.float64)).sum(1).max(initial=0))
        return Lattice(torch.from_numpy(query).bfloat16(), torch.from_numpy(weights).unsqueeze(1), widest, mass)

    def scores(self, values: NDArray[np.uint8], scales: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
        """[rows, n] exact scores of keys [n, dim] e4m3; None when something might round.

        A dot is at most dim |q| |k|, which bf16 must hold; a weighted sum of dots, times the scale, is what fp32 must hold.
        """
        sigma = np.ones(len(values), np.float32) if scales is None else scales
        keys = _VALUES.index_select(0, torch.from_numpy(values).view(-1).int()).view(values.shape)
        dot = values.shape[1] * self.widest * (float(keys.abs().max()) if keys.numel() else 0.0)
        score = dot * self.mass * float(np.abs(sigma).max(initial=0))
        if not (dot <= WHOLE_BF16 and score < WHOLE_FP32) or not bool((keys.round() == keys).all()) or not _whole(sigma):
            return None
        rows, _, heads = self.weights.shape
        out = torch.empty((rows, 1, len(values)))
        for start in range(0, len(values), KEYS):
            dots = torch.mm(self.query, keys[start : start + KEYS].t()).relu_().float()
            torch.matmul(self.weights, dots.view(rows, heads, -1), out=out[:, :, start : start + KEYS])
        return out.squeeze(1).numpy() * sigma


def _whole(values: NDArray[np.floating]) -> bool:
    """Whether every number is whole; NaN and infinities are not."""
    return bool(np.isfinite(values).all() and (np.rint(values) == values).all())
