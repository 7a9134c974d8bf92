"""index_select of the compiled engines: groups of rows on threads, each group streaming the keys once; what differs is the
scratch and the kernels."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.workers import each
from palimpsest.ranks.layout import row_slice


class Kernels(NamedTuple):
    """What an engine brings.

    make(call):                      scratch of one thread, a NamedTuple with ``held`` [rows of a group], ``seen`` and
    ``scores`` [lines, tile]
    begin(group, queries, weights):  load queries [m, heads, dim] e4m3 codes and head weights [m, heads]; forget all candidates
    score(group, keys, scales, seen, start, stop, shared, nans): score tokens, keep candidates
    emit(group, ids, counts):        write ids [m, topk] and counts [m]
    """

    make: Callable[[Call], Any]
    begin: Callable[..., None]
    score: Callable[..., None]
    emit: Callable[..., None]


def select(call: Call, chunk: Chunk, kernels: Kernels) -> None:
    """See the contract and ``cpu.run``, whose taps this has too: a watched call goes tile by tile in groups of SELECT_ROWS,
    same bits."""
    ranks, slots = call.params["ranks"], call.view("local_ids").shape[0]
    start, stop = row_slice(call.comm.rank, ranks, slots * ranks, chunk.rows)
    if start == stop:
        return
    call.scratch.reset()
    groups = [kernels.make(call) for _ in range(1 if call.watched else call.params.get("threads", 1))]
    most = len(groups[0].held)
    step = min(most, sizes.SELECT_ROWS) if call.watched else most
    # equal groups: with few rows every thread gets some, and no group is left with a handful
    parts = -(-(stop - start) // step)
    parts = max(parts, min(len(groups), stop - start))
    bounds = [start + (stop - start) * i // parts for i in range(parts + 1)]
    ranges = [range(first, end) for first, end in pairwise(bounds)]
    each(ranges, len(groups), lambda thread, rows: _select(call, kernels, groups[thread], chunk, rows))


def _select(call: Call, kernels: Kernels, group: Any, chunk: Chunk, rows: range) -> None:
    slot = rows[0] % call.view("local_ids").shape[0]
    slots = slice(slot, slot + len(rows))
    counts, nans = (call.view("local_counts", name).numpy()[slots] for name in ("counts", "nans"))
    queries = call.view("index_query").view(torch.uint8).numpy()[slots]
    keys, scales = call.view("index_history", "keys").view(torch.uint8).numpy(), call.view("index_history", "scales").numpy()
    kernels.begin(group, queries, call.view("head_weights").numpy()[slots])
    seen = group.seen[: len(rows)]
    seen[:] = range(chunk.history + rows[0] + 1, chunk.history + rows[-1] + 2)
    nans.fill(0)
    end = int(seen[-1])
    if not call.watched:
        kernels.score(group, keys, scales, seen, 0, end, True, nans)
    else:
        tile = group.scores.shape[1]
        for first in range(0, end, tile):
            kernels.score(group, keys, scales, seen, first, min(first + tile, end), False, nans)
            _show(call, group, rows, seen, first)
    kernels.emit(group, call.view("local_ids").numpy()[slots], counts)
    call.tap("selected", rows=rows)


def _show(call: Call, group: Any, rows: range, seen: np.ndarray, first: int) -> None:
    for i, row in enumerate(rows):
        visible = min(group.scores.shape[1], int(seen[i]) - first)
        if visible > 0:
            shown = group.scores[i, :visible]
            shown.flags.writeable = False
            call.tap("scores", row=row, start=first, scores=shown)
