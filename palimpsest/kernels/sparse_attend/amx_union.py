"""sparse_attend, ``amx-union`` engine: ATTEND_ROWS neighbouring rows share one pass over the records any of them selected, when that is cheaper.

A union's blocks hold other rows' ids too, so sums round at other places: a row's bits depend on its neighbours, on how a chunk is cut (groups
start at absolute multiples of ATTEND_ROWS) and on the heads per rank. Errors stay within the same bound. Where bits matter, use ``amx``.
"""

import numpy as np

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.sparse_attend import cpu
from palimpsest.kernels.sparse_attend.amx import Operands, Work, attend_slice, checked_counts, takes
from palimpsest.kernels.sparse_attend.amx_union_kernel import attend_union, join_rows
from palimpsest.kernels.workers import each


class _Union:
    """Scratch of one thread (``sizes.amx_union_scratch``)."""

    def __init__(self, call: Call):
        scratch, p = call.scratch, call.params
        self.rows = Work(scratch, p["topk"], p["heads"], p["kv_lora"], p["rope_dims"])
        self.lanes = sizes.union_heads(p["heads"])
        if not self.lanes:
            return
        lanes, words = sizes.ATTEND_ROWS * self.lanes, sizes.UNION_WINDOW // 64
        self.work = Work(scratch, sizes.UNION_IDS, lanes, p["kv_lora"], p["rope_dims"])
        self.masks = scratch.take((sizes.UNION_IDS, 2 * sizes.amx_head_tiles(lanes)), "u8").numpy().view(np.uint16)
        self.union = scratch.take((sizes.UNION_IDS,), "i32").numpy()
        self.bits = scratch.take((words,), "i64").numpy().view(np.uint64)
        self.before = scratch.take((words,), "i32").numpy()
        self.places = scratch.take((sizes.ATTEND_ROWS,), "i32").numpy()
        self.ends = scratch.take((sizes.ATTEND_ROWS,), "i32").numpy()


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    if not takes(call):
        cpu.run(call, chunk)
        return
    checked_counts(call, chunk)
    operands = Operands(call)
    call.scratch.reset()
    works = [_Union(call) for _ in range(call.params.get("threads", 1))]
    size = sizes.ATTEND_ROWS
    starts = [0, *range(size - chunk.history % size, chunk.rows, size)]
    groups = [slice(first, min(end, chunk.rows)) for first, end in zip(starts, [*starts[1:], chunk.rows], strict=True) if first < chunk.rows]
    each(groups, len(works), lambda thread, rows: _attend(operands, works[thread], rows))


def _attend(o: Operands, union: _Union, rows: slice) -> None:
    """One group: by union when so few distinct ids suffice that it is cheaper than row by row.

    A union's id costs what 4 ids of a row cost with 8 lanes a row, and 7 with 16 (measured): all lanes multiply, wanted or not.
    """
    counts = o.counts[rows]
    most = min(sizes.UNION_IDS, int(counts.sum()) // (4 if union.lanes == 8 else 7))
    count, heads = -1, o.query.shape[1]
    if union.lanes and len(counts) > 1:
        count = join_rows(
            o.ids[rows], counts, union.lanes, heads, most, union.union, union.masks, union.bits, union.before, union.places, union.ends
        )
    if count <= 0:
        attend_slice(o, union.rows, rows)
        return
    work = union.work
    padded = -(-count // 64) * 64
    attend_union(
        o.history, union.union[:count], union.masks[:padded], counts, union.lanes, o.query[rows], o.context[rows], o.kind, o.latent, o.scale,
        o.factor, work.records, work.queries, work.wide, work.pairs, work.scores, work.p, work.totals, work.state, work.staging,
    )  # fmt: skip
