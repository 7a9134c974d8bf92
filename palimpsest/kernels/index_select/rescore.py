"""Exact scores of any keys of the fp8 index history for one query row at a time."""

import numpy as np
import torch

from palimpsest.kernels.call import Call, Scratch
from palimpsest.kernels.fp8 import Decoder
from palimpsest.kernels.index_select.exact import Exact


class Rescore:
    """``columns`` keys at once (``sizes.rescore_scratch``). ``forget`` what is loaded when others used the scratch in between.

    decode: to fp64, of max(columns, heads) * dim codes
    """

    __slots__ = (
        "call", "codes", "columns", "decode", "exact", "key_codes", "key_scales", "keys", "query", "row", "scales", "tile",
        "weights",
    )  # fmt: skip

    def __init__(self, call: Call, scratch: Scratch, decode: Decoder, columns: int):
        heads, dim = call.params["heads"], call.params["dim"]
        self.call, self.columns, self.decode = call, columns, decode
        self.exact = Exact(scratch, heads, columns)
        self.query = scratch.take((heads, dim), "fp64")
        self.weights = scratch.take((heads,), "fp64")
        self.keys = scratch.take((max(columns, heads), dim), "fp64")
        self.codes = scratch.take((columns, dim), "u8")
        self.scales = scratch.take((columns,), "fp64")
        self.key_codes = call.view("index_history", "keys").view(torch.uint8)
        self.key_scales = call.view("index_history", "scales")
        self.row, self.tile = -1, (-1, -1)

    def forget(self) -> None:
        self.row, self.tile = -1, (-1, -1)

    def mass(self, slot: int) -> float:
        """sum_h |w_h| sum_j |q_hj| of a row of the slice."""
        self._query(slot)
        spread = self.keys[: self.query.shape[0]]
        torch.abs(self.query, out=spread)
        norms = self.exact.dots[: self.query.shape[0]]
        torch.sum(spread, 1, out=norms)
        self.tile = (-1, -1)
        return sum(abs(weight) * norm for weight, norm in zip(self.weights.tolist(), norms.tolist(), strict=True))

    def tile_scores(self, slot: int, start: int, out: np.ndarray) -> None:
        """Scores of row ``slot`` for the tokens from ``start``, NaN and all."""
        self._query(slot)
        for first in range(0, len(out), self.columns):
            count = min(self.columns, len(out) - first)
            begin = start + first
            if self.tile[0] != begin or self.tile[1] < count:
                part = slice(begin, begin + count)
                self._keys(self.key_codes[part], self.key_scales[part])
                self.tile = (begin, count)
            np.copyto(out[first : first + count], self._scores(count))

    def picked_scores(self, slot: int, ids: torch.Tensor) -> np.ndarray:
        """Scores of row ``slot`` for the tokens ``ids`` (int32, at most ``columns``); valid until the next call."""
        self._query(slot)
        count = ids.shape[0]
        codes, scales = self.codes[:count], self.exact.scores[:count]
        torch.index_select(self.key_codes, 0, ids, out=codes)
        torch.index_select(self.key_scales, 0, ids, out=scales)
        self._keys(codes, scales)
        self.tile = (-1, -1)
        return self._scores(count)

    def _query(self, slot: int) -> None:
        if self.row != slot:
            self.decode(self.call.view("index_query")[slot].view(torch.uint8), self.query)
            self.weights.copy_(self.call.view("head_weights")[slot])
            self.row = slot

    def _keys(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        count = codes.shape[0]
        self.decode(codes, self.keys[:count])
        self.scales[:count].copy_(scales)

    def _scores(self, count: int) -> np.ndarray:
        return self.exact(self.query, self.weights, self.keys[:count], self.scales[:count], count)
