"""index_select, ``amx`` engine: groups of rows on threads, each group streaming the keys once through AMX tiles and an exact top-k.

fp8 records of at most 128 dims; other records are selected by the portable engine's file, in its arithmetic.
"""

import numpy as np

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.index_select import cpu
from palimpsest.kernels.index_select.amx_kernel import begin, emit, pass_tiles
from palimpsest.kernels.index_select.streaming import select


class _Group:
    """Scratch of one thread (``sizes.amx_select_scratch``); see ``streaming.Group``."""

    def __init__(self, call: Call):
        scratch, p = call.scratch, call.params
        self.topk, heads, dim = p["topk"], p["heads"], p["dim"]
        rows, tile, width = sizes.amx_select_rows(self.topk, heads, dim), sizes.AMX_KEY_TILE, sizes.amx_dim(dim)
        padded, capacity = sizes.amx_heads(heads), sizes.fast_capacity(self.topk)
        self.rows = rows
        self.wide = scratch.take((rows, padded, 2 * width), "u8").numpy().view(np.uint16)
        self.weights = scratch.take((rows, padded), "fp32").numpy()
        self.packed = scratch.take((tile * 2 * width,), "u8").numpy().view(np.uint16)
        self.tail = scratch.take((16, width), "u8").numpy()
        self.scales = scratch.take((tile,), "fp32").numpy()
        self.scores = scratch.take((sizes.SELECT_ROWS, tile), "fp32").numpy()
        self.sums = scratch.take((32,), "fp32").numpy()
        self.dots = scratch.take((2048,), "fp32").numpy()
        self.candidates = scratch.take((rows, capacity), "i32").numpy()
        self.ids = scratch.take((rows, capacity), "i32").numpy()
        self.held = scratch.take((rows,), "i64").numpy()
        self.least = scratch.take((rows,), "i32").numpy()
        self.seen = scratch.take((rows,), "i64").numpy()
        self.work = scratch.take((4, capacity), "i32").numpy()
        self.sample = scratch.take((16,), "i32").numpy()

    def begin(self, queries: np.ndarray, weights: np.ndarray) -> None:
        begin(queries, weights, self.wide, self.weights, self.tail, self.held, self.least)

    def score(self, keys: np.ndarray, scales: np.ndarray, seen: np.ndarray, tokens: range, scores: np.ndarray, nans: np.ndarray) -> None:
        pass_tiles(
            keys, scales, seen, tokens.start, tokens.stop, self.wide, self.weights, self.packed, self.tail, self.scales, scores, self.sums,
            self.dots, self.candidates, self.ids, self.held, self.least, self.work, self.sample, nans, self.topk,
        )  # fmt: skip

    def emit(self, ids: np.ndarray, counts: np.ndarray) -> None:
        emit(self.candidates, self.ids, self.held, self.work, self.sample, self.topk, ids, counts)


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    if sizes.amx_selects(call.params["format"], call.params["dim"]):
        select(call, chunk, _Group)
    else:
        cpu.run(call, chunk)
