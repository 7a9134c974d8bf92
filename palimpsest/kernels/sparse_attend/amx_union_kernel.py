"""sparse_attend by union: each distinct record of neighbouring rows is decoded once and attended by all their heads under a
mask."""

import numpy as np

from palimpsest.kernels.amx_ir import tile_begin, tile_end
from palimpsest.kernels.jit import kernel
from palimpsest.kernels.sparse_attend.amx_join import Joined, join
from palimpsest.kernels.sparse_attend.amx_kernel import Work, attend, load_queries
from palimpsest.kernels.sparse_attend.avx512_records import Form
from palimpsest.kernels.sparse_attend.avx512_softmax import finish_head


@kernel("i4[:,::1]", "i4[::1]", "i8", "i8", "i8", Joined, returns="i8")
def join_rows(ids, counts, lanes, heads, most, joined):
    """``amx_join.join``."""
    return join(ids, counts, lanes, heads, most, joined)


@kernel("u1[:,::1]", "i8", "i4[::1]", "u2[:,:,::1]", "f4[:,:,::1]", Form, Joined, Work)
def attend_union(history, count, counts, query, context, form, joined, work):
    """Context [m, heads, latent] of m rows over the first ``count`` ids of ``joined``."""
    base, pitch, masks, padded = history.ctypes.data, history.shape[1], joined.masks, (count + 63) // 64 * 64
    tile_begin()
    for j in range(count):
        work.records[j] = base + np.uint64(joined.union[j]) * np.uint64(pitch)
    for j in range(count, padded):
        for tile in range(masks.shape[1]):
            masks[j, tile] = 0
    for row in range(query.shape[0]):
        load_queries(query[row], row * form.lanes, work.queries)
    attend(work.records[:count], masks[:padded], form, work)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            if counts[row] > 0:
                finish_head(work, row * form.lanes + head, np.float32(form.factor), context[row, head])
            else:
                for column in range(context.shape[2]):
                    context[row, head, column] = np.float32(0)
    tile_end()
