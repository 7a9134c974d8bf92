"""The scores of portable-1 themselves: fp64 dots, heads added in ascending order, one rounding to fp32."""

import numpy as np
import torch

from palimpsest.kernels.call import Scratch


class Exact:
    """Scores one row against a block of at most ``columns`` keys (``sizes.exact_scratch``)."""

    def __init__(self, scratch: Scratch, heads: int, columns: int):
        self.heads = heads
        self.dots = scratch.take((heads * columns,), "fp64")
        self.sums = scratch.take((columns,), "fp64")
        self.scores = scratch.take((columns,), "fp32")

    def __call__(
        self, query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None, seen: int
    ) -> np.ndarray:
        """fp32 scores of the first ``seen`` keys; valid until the next call.

        query [heads, dim], weights [heads], keys [n, dim], scales [n] (None: none): fp64. Dots of e4m3 values are exact in fp64,
        so their GEMM may have any shape; fp32 records keep one shape for every tile. Heads add in ascending order, one
        multiply and one add each; one rounding to fp32; +0.0 turns -0 into +0.
        """
        columns = keys.shape[0]
        dots = self.dots[: self.heads * columns].view(self.heads, columns)
        torch.mm(query, keys.t(), out=dots)
        torch.relu_(dots)
        torch.mul(dots, weights.unsqueeze(1), out=dots)
        sums = self.sums.numpy()[:seen]
        sums.fill(0)
        # head by head on contiguous rows: no sum over an axis promises its order
        for part in dots.numpy()[:, :seen]:
            np.add(sums, part, out=sums)
        if scales is not None:
            np.multiply(sums, scales.numpy()[:seen], out=sums)
        self.scores[:seen].copy_(self.sums[:seen])
        found = self.scores.numpy()[:seen]
        np.add(found, np.float32(0), out=found)
        return found
