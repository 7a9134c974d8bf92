"""index_select, ``avx`` engine: groups of rows on threads, each group streaming the keys once through vectorised loops and an exact top-k.

fp8 records; fp32 records are selected by the portable engine's file, in its arithmetic.
"""

import numpy as np
import torch

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.index_select import cpu
from palimpsest.kernels.index_select.avx_kernel import RUN, begin, emit, pass_tiles
from palimpsest.kernels.index_select.streaming import select


class _Group:
    """Scratch of one thread (``sizes.avx_select_scratch``); see ``streaming.Group``."""

    def __init__(self, call: Call):
        scratch, p = call.scratch, call.params
        self.topk, heads, dim = p["topk"], p["heads"], p["dim"]
        rows, tile, width = sizes.avx_select_rows(self.topk, heads, dim), sizes.AMX_KEY_TILE, sizes.avx_dim(dim)
        padded, capacity = sizes.avx_heads(heads), sizes.fast_capacity(self.topk)
        self.rows = rows
        table = scratch.take((256,), "fp32")
        codes = scratch.take((256,), "u8")
        torch.arange(256, out=codes)
        table.copy_(codes.view(torch.float8_e4m3fn))
        self.table = table.numpy()
        self.wide = scratch.take((rows, padded, width), "fp32").numpy()
        self.weights = scratch.take((rows, padded), "fp32").numpy()
        self.columns = scratch.take((tile // RUN, width, RUN), "fp32").numpy()
        self.scores = scratch.take((sizes.SELECT_ROWS, tile), "fp32").numpy()
        self.sums = scratch.take((4, RUN), "fp32").numpy()
        self.line = scratch.take((tile,), "i32").numpy()
        self.candidates = scratch.take((rows, capacity), "i32").numpy()
        self.ids = scratch.take((rows, capacity), "i32").numpy()
        self.held = scratch.take((rows,), "i64").numpy()
        self.least = scratch.take((rows,), "i32").numpy()
        self.seen = scratch.take((rows,), "i64").numpy()
        self.work = scratch.take((4 * capacity,), "i32").numpy()
        self.sample = scratch.take((16,), "i32").numpy()

    def begin(self, queries: np.ndarray, weights: np.ndarray) -> None:
        begin(queries, weights, self.table, self.wide, self.weights, self.held, self.least)

    def score(self, keys: np.ndarray, scales: np.ndarray, seen: np.ndarray, tokens: range, scores: np.ndarray, nans: np.ndarray) -> None:
        pass_tiles(
            keys, scales, seen, tokens.start, tokens.stop, self.table, self.wide, self.weights, self.columns, scores, self.sums,
            self.line, self.candidates, self.ids, self.held, self.least, self.work, self.sample, nans, self.topk,
        )  # fmt: skip

    def emit(self, ids: np.ndarray, counts: np.ndarray) -> None:
        emit(self.candidates, self.ids, self.held, self.work, self.sample, self.topk, ids, counts)


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    if call.params["format"] == "fp8":
        select(call, chunk, _Group)
    else:
        cpu.run(call, chunk)
