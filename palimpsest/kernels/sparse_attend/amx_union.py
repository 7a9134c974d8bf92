"""sparse_attend, ``amx-union`` engine: ATTEND_ROWS neighbouring rows share one pass over the records any of them selected, when
that is cheaper.

A union's blocks hold other rows' ids too, so sums round at other places: a row's bits depend on its neighbours, on how a chunk
is cut (groups
start at absolute multiples of ATTEND_ROWS) and on the heads per rank. Errors stay within the same bound. Where bits matter, use
``amx``.
"""

from typing import NamedTuple

import numpy as np

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.sparse_attend import cpu
from palimpsest.kernels.sparse_attend.amx import carve
from palimpsest.kernels.sparse_attend.amx_join import Joined
from palimpsest.kernels.sparse_attend.amx_kernel import Work, attend_rows
from palimpsest.kernels.sparse_attend.amx_union_kernel import attend_union, join_rows
from palimpsest.kernels.sparse_attend.compiled import Operands, checked_counts, takes
from palimpsest.kernels.workers import each


class _Thread(NamedTuple):
    """Scratch of one thread (``sizes.amx_union_scratch``): of a row alone, and of a union where the heads allow one."""

    row: Work
    union: Work | None = None
    joined: Joined | None = None


def _thread(call: Call, lanes: int) -> _Thread:
    scratch, p = call.scratch, call.params
    row = carve(scratch, p["topk"], p["heads"], p["kv_lora"], p["rope_dims"])
    if not lanes:
        return _Thread(row)
    wide, words = sizes.ATTEND_ROWS * lanes, sizes.UNION_WINDOW // 64
    joined = Joined(
        union=scratch.take((sizes.UNION_IDS,), "i32").numpy(),
        masks=scratch.take((sizes.UNION_IDS, 2 * sizes.amx_head_tiles(wide)), "u8").numpy().view(np.uint16),
        bits=scratch.take((words,), "i64").numpy().view(np.uint64),
        before=scratch.take((words,), "i32").numpy(),
        places=scratch.take((sizes.ATTEND_ROWS,), "i32").numpy(),
        ends=scratch.take((sizes.ATTEND_ROWS,), "i32").numpy(),
    )
    return _Thread(row, carve(scratch, sizes.UNION_IDS, wide, p["kv_lora"], p["rope_dims"]), joined)


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    if not takes(call):
        cpu.run(call, chunk)
        return
    checked_counts(call, chunk)
    lanes = sizes.union_heads(call.params["heads"])
    operands = Operands(call, attend_rows, lanes)
    call.scratch.reset()
    threads = [_thread(call, lanes) for _ in range(call.params.get("threads", 1))]
    size = sizes.ATTEND_ROWS
    starts = [0, *range(size - chunk.history % size, chunk.rows, size)]
    groups = [
        slice(first, min(end, chunk.rows))
        for first, end in zip(starts, [*starts[1:], chunk.rows], strict=True)
        if first < chunk.rows
    ]
    each(groups, len(threads), lambda thread, rows: _attend(operands, threads[thread], rows))


def _attend(o: Operands, thread: _Thread, rows: slice) -> None:
    """One group: by union when so few distinct ids suffice that it is cheaper than row by row.

    A union's id costs what 4 ids of a row cost with 8 lanes a row, and 7 with 16 (measured): all lanes multiply, wanted or not.
    """
    counts, count = o.counts[rows], -1
    if thread.union is not None and thread.joined is not None and len(counts) > 1:
        most = min(sizes.UNION_IDS, int(counts.sum()) // (4 if o.form.lanes == 8 else 7))
        count = join_rows(o.ids[rows], counts, o.form.lanes, o.query.shape[1], most, thread.joined)
    if count <= 0:
        o.rows(thread.row, rows)
        return
    attend_union(o.history, count, counts, o.query[rows], o.context[rows], o.form, thread.joined, thread.union)
