"""index_select of the compiled engines: groups of rows on threads, each group streaming the keys once; what differs is the scratch and the kernels."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.workers import each
from palimpsest.ranks.layout import row_slice


class Group(Protocol):
    """Scratch of one thread and the kernels that use it.

    rows: most rows of a group; seen [rows] i64; scores [SELECT_ROWS, tile] fp32
    """

    rows: int
    seen: np.ndarray
    scores: np.ndarray

    def begin(self, queries: np.ndarray, weights: np.ndarray) -> None:
        """Load queries [m, heads, dim] e4m3 codes and head weights [m, heads]; forget all candidates."""

    def score(self, keys: np.ndarray, scales: np.ndarray, seen: np.ndarray, tokens: range, scores: np.ndarray, nans: np.ndarray) -> None:
        """Score ``tokens`` and keep candidates; scores [1 or m, tile]."""

    def emit(self, ids: np.ndarray, counts: np.ndarray) -> None:
        """Write ids [m, topk] and counts [m]."""


def select(call: Call, chunk: Chunk, make: Callable[[Call], Group]) -> None:
    """See the contract and ``cpu.run``, whose taps this has too: a watched call goes tile by tile in groups of SELECT_ROWS, same bits."""
    ranks, slots = call.params["ranks"], call.view("local_ids").shape[0]
    start, stop = row_slice(call.comm.rank, ranks, slots * ranks, chunk.rows)
    if start == stop:
        return
    call.scratch.reset()
    groups = [make(call) for _ in range(1 if call.watched else call.params.get("threads", 1))]
    step = min(groups[0].rows, sizes.SELECT_ROWS) if call.watched else groups[0].rows
    # equal groups: with few rows every thread gets some, and no group is left with a handful
    parts = -(-(stop - start) // step)
    parts = max(parts, min(len(groups), stop - start))
    bounds = [start + (stop - start) * i // parts for i in range(parts + 1)]
    each(_ranges(bounds), len(groups), lambda thread, rows: _select(call, groups[thread], chunk, rows, start))


def _ranges(bounds: Sequence[int]) -> list[range]:
    return [range(first, end) for first, end in zip(bounds, bounds[1:], strict=False)]


def _select(call: Call, group: Group, chunk: Chunk, rows: range, start: int) -> None:
    slots = slice(rows[0] - start, rows[0] - start + len(rows))
    counts, nans = (call.view("local_counts", name).numpy()[slots] for name in ("counts", "nans"))
    queries = call.view("index_query").view(torch.uint8).numpy()[slots]
    keys, scales = call.view("index_history", "keys").view(torch.uint8).numpy(), call.view("index_history", "scales").numpy()
    group.begin(queries, call.view("head_weights").numpy()[slots])
    seen = group.seen[: len(rows)]
    seen[:] = range(chunk.history + rows[0] + 1, chunk.history + rows[-1] + 2)
    nans.fill(0)
    end = int(seen[-1])
    if not call.watched:
        group.score(keys, scales, seen, range(end), group.scores[:1], nans)
    else:
        tile = group.scores.shape[1]
        for first in range(0, end, tile):
            group.score(keys, scales, seen, range(first, min(first + tile, end)), group.scores, nans)
            _show(call, group, rows, seen, first)
    group.emit(call.view("local_ids").numpy()[slots], counts)
    call.tap("selected", rows=rows)


def _show(call: Call, group: Group, rows: range, seen: np.ndarray, first: int) -> None:
    for i, row in enumerate(rows):
        visible = min(group.scores.shape[1], int(seen[i]) - first)
        if visible > 0:
            shown = group.scores[i, :visible]
            shown.flags.writeable = False
            call.tap("scores", row=row, start=first, scores=shown)
