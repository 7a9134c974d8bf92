"""index_select, portable engine. fp8 records are filtered by fast scores and decided by exact ones (``filtered``); what is here
is the run and the way of fp32 records: exact scores and exact top-k, one key tile and one row at a time.

A candidate is one int64: the score's order in the high half (best first), the token id in the low half. Ascending order of these
numbers is the selection order, ties included, and the id reads back from the low half. Per row, the ``topk`` best so far and the
new tile lie side by side and one in-place partition keeps the best."""

import numpy as np
import torch

from palimpsest.core.units import ceil_div
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.index_select import filtered
from palimpsest.kernels.index_select.exact import Exact
from palimpsest.kernels.sizes import KEY_TILE, SELECT_ROWS
from palimpsest.ranks.layout import row_slice

_LAST = np.iinfo(np.int64).max


class _Tiles:
    """Scratch of one call, carved once."""

    def __init__(self, call: Call):
        scratch, p = call.scratch, call.params
        topk, heads, dim = p["topk"], p["heads"], p["dim"]
        scratch.reset()
        self.exact = Exact(scratch, heads, KEY_TILE)
        self.keys = scratch.take((KEY_TILE, dim), "fp64")
        self.queries = scratch.take((SELECT_ROWS, heads, dim), "fp64")
        self.weights = scratch.take((SELECT_ROWS, heads), "fp64")
        self.order = scratch.take((KEY_TILE,), "i32")
        self.sign = scratch.take((KEY_TILE,), "i32")
        self.ids = scratch.take((KEY_TILE,), "i64")
        self.nan = scratch.take((KEY_TILE,), "u8")
        self.state = scratch.take((SELECT_ROWS, topk + KEY_TILE), "i64").numpy()


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. Taps: ``scores`` (row, start, scores fp32, read-only) per row and key tile; ``selected`` (rows) per row
    group.
    """
    slots = call.view("local_ids").shape[0]
    start, stop = row_slice(call.comm.rank, call.params["ranks"], slots * call.params["ranks"], chunk.rows)
    if start == stop:
        return
    with np.errstate(invalid="ignore", over="ignore"):
        if call.params["format"] == "fp8":
            filtered.select(call, chunk, range(start, stop))
            return
        tiles = _Tiles(call)
        for first in range(start, stop, SELECT_ROWS):
            rows = range(first, min(first + SELECT_ROWS, stop))
            _select_group(call, tiles, chunk, rows, first - start)
            call.tap("selected", rows=rows)


def _select_group(call: Call, tiles: _Tiles, chunk: Chunk, rows: range, slot: int) -> None:
    """Rows ``rows`` of the chunk, kept at ``slot`` of the slice."""
    topk, count = call.params["topk"], len(rows)
    nans = call.view("local_counts", "nans").numpy()[slot : slot + count]
    nans.fill(0)
    _load_queries(call, tiles, slot, count)
    tiles.state[:count, :topk] = _LAST
    for tile in range(ceil_div(chunk.history + rows[-1] + 1, KEY_TILE)):
        start = tile * KEY_TILE
        width = min(KEY_TILE, chunk.history + rows[-1] + 1 - start)
        _load_keys(call, tiles, start, width)
        for i, row in enumerate(rows):
            seen = min(width, chunk.history + row + 1 - start)
            if seen > 0:
                scores = tiles.exact(tiles.queries[i], tiles.weights[i], tiles.keys, None, seen)
                _tap(call, row, start, scores)
                nans[i] += _rank(tiles, scores, tiles.state[i, topk : topk + seen])
                tiles.state[i, : topk + seen].partition(topk - 1)
    for i, row in enumerate(rows):
        _emit(call, tiles.state[i, :topk], slot + i, min(topk, chunk.history + row + 1))


def _load_queries(call: Call, tiles: _Tiles, slot: int, count: int) -> None:
    tiles.queries[:count].copy_(call.view("index_query")[slot : slot + count])
    tiles.weights[:count].copy_(call.view("head_weights")[slot : slot + count])


def _load_keys(call: Call, tiles: _Tiles, start: int, width: int) -> None:
    """Keys [start, start+width) as fp64; columns past ``width`` are stale and their scores are never looked at."""
    torch.arange(start, start + width, out=tiles.ids[:width])
    tiles.keys[:width].copy_(call.view("index_history", "keys")[start : start + width])


def _tap(call: Call, row: int, start: int, scores: np.ndarray) -> None:
    shown = scores.view()
    shown.flags.writeable = False
    call.tap("scores", row=row, start=start, scores=shown)


def _rank(tiles: _Tiles, scores: np.ndarray, out: np.ndarray) -> int:
    """Write the candidates of ``scores`` to ``out`` (int64); returns how many scores were NaN (they rank as -inf)."""
    seen = scores.shape[0]
    nan, order, sign = tiles.nan.numpy()[:seen].view(np.bool_), tiles.order.numpy()[:seen], tiles.sign.numpy()[:seen]
    np.isnan(scores, out=nan)
    lost = int(np.count_nonzero(nan))
    if lost:
        np.copyto(scores, np.float32(-np.inf), where=nan)
    # an fp32's bits order like its value once the magnitude bits of negatives are flipped; the final flip puts the best first
    bits = scores.view(np.int32)
    np.right_shift(bits, 31, out=sign)
    np.bitwise_and(sign, 0x7FFFFFFF, out=sign)
    np.bitwise_xor(bits, sign, out=order)
    np.invert(order, out=order)
    np.copyto(out, order)
    np.left_shift(out, 32, out=out)
    np.bitwise_or(out, tiles.ids.numpy()[:seen], out=out)
    return lost


def _emit(call: Call, best: np.ndarray, slot: int, count: int) -> None:
    """Ids ascending, then -1; unused candidates read as 0xFFFFFFFF and so sort last."""
    np.bitwise_and(best, 0xFFFFFFFF, out=best)
    best.sort()
    ids = call.view("local_ids").numpy()[slot]
    np.copyto(ids[:count], best[:count], casting="same_kind")
    ids[count:].fill(-1)
    call.view("local_counts", "counts").numpy()[slot] = count
