"""index_select, ``amx`` engine: groups of rows on threads, each group streaming the keys once through AMX tiles and an exact top-k.

fp8 records of at most 128 dims; other records are selected by the portable engine's file, in its arithmetic.
"""

import numpy as np
import torch

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.index_select import cpu
from palimpsest.kernels.index_select.amx_kernel import begin, emit, pass_tiles
from palimpsest.kernels.workers import each
from palimpsest.ranks.layout import row_slice


class _Group:
    """Scratch of one thread, carved once per call (``sizes.amx_select_scratch``)."""

    def __init__(self, scratch: Scratch, topk: int, heads: int, dim: int):
        rows, tile, width = sizes.amx_select_rows(topk, heads, dim), sizes.AMX_KEY_TILE, sizes.amx_dim(dim)
        padded, capacity = sizes.amx_heads(heads), sizes.fast_capacity(topk)
        take = lambda shape, dtype: scratch.take(shape, dtype).numpy()  # noqa: E731
        self.rows = rows
        self.wide = take((rows, padded, 2 * width), "u8").view("u2")
        self.weights = take((rows, padded), "fp32")
        self.packed = take((tile * 2 * width,), "u8").view("u2")
        self.tail = take((16, width), "u8")
        self.scales = take((tile,), "fp32")
        self.scores = take((sizes.SELECT_ROWS, tile), "fp32")
        self.sums = take((32,), "fp32")
        self.dots = take((2048,), "fp32")
        self.candidates = take((rows, capacity), "i32")
        self.ids = take((rows, capacity), "i32")
        self.held = take((rows,), "i64")
        self.least = take((rows,), "i32")
        self.seen = take((rows,), "i64")
        self.work = take((4, capacity), "i32")
        self.sample = take((16,), "i32")


def run(call: Call, chunk: Chunk) -> None:
    """See the contract and ``cpu.run``, whose taps this has too: a watched call goes tile by tile in groups of SELECT_ROWS, same bits."""
    p = call.params
    if not sizes.amx_selects(p["format"], p["dim"]):
        cpu.run(call, chunk)
        return
    slots = call.view("local_ids").shape[0]
    start, stop = row_slice(call.comm.rank, p["ranks"], slots * p["ranks"], chunk.rows)
    if start == stop:
        return
    call.scratch.reset()
    watched = call.watched
    groups = [_Group(call.scratch, p["topk"], p["heads"], p["dim"]) for _ in range(1 if watched else p["threads"])]
    step = min(groups[0].rows, sizes.SELECT_ROWS) if watched else groups[0].rows
    ranges = [range(first, min(first + step, stop)) for first in range(start, stop, step)]
    each(ranges, len(groups), lambda thread, rows: _select(call, groups[thread], chunk, rows, start))


def _select(call: Call, group: _Group, chunk: Chunk, rows: range, start: int) -> None:
    topk, count, at = call.params["topk"], len(rows), rows[0] - start
    slots = slice(at, at + count)
    counts, nans = (call.view("local_counts", name).numpy()[slots] for name in ("counts", "nans"))
    queries = call.view("index_query").view(torch.uint8).numpy()[slots]
    weights = call.view("head_weights").numpy()[slots]
    begin(queries, weights, group.wide[:count], group.weights[:count], group.tail, group.held, group.least)
    seen = group.seen[:count]
    seen[:] = range(chunk.history + rows[0] + 1, chunk.history + rows[-1] + 2)
    nans.fill(0)
    if call.watched:
        _watch(call, group, rows, seen, nans)
    else:
        _pass(call, group, seen, nans, range(int(seen[-1])))
    emit(group.candidates, group.ids, group.held, group.work, group.sample, topk, call.view("local_ids").numpy()[slots], counts)
    call.tap("selected", rows=rows)


def _pass(call: Call, group: _Group, seen: np.ndarray, nans: np.ndarray, tokens: range) -> None:
    keys = call.view("index_history", "keys").view(torch.uint8).numpy()
    scores = group.scores if call.watched else group.scores[:1]
    pass_tiles(
        keys, call.view("index_history", "scales").numpy(), seen, tokens.start, tokens.stop, group.wide, group.weights,
        group.packed, group.tail, group.scales, scores, group.sums, group.dots,
        group.candidates, group.ids, group.held, group.least, group.work, group.sample, nans, call.params["topk"],
    )  # fmt: skip


def _watch(call: Call, group: _Group, rows: range, seen: np.ndarray, nans: np.ndarray) -> None:
    """One key tile at a time, showing each row's scores before the next tile overwrites them."""
    end = int(seen[-1])
    for first in range(0, end, sizes.AMX_KEY_TILE):
        tokens = range(first, min(first + sizes.AMX_KEY_TILE, end))
        _pass(call, group, seen, nans, tokens)
        for i, row in enumerate(rows):
            visible = min(len(tokens), int(seen[i]) - first)
            if visible > 0:
                shown = group.scores[i, :visible]
                shown.flags.writeable = False
                call.tap("scores", row=row, start=first, scores=shown)
