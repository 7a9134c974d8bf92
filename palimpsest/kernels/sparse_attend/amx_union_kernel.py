"""sparse_attend by union: each distinct record of neighbouring rows is decoded once and attended by all their heads under a mask."""

import numpy as np

from palimpsest.kernels.amx_ir import tile_begin, tile_end
from palimpsest.kernels.jit import kernel
from palimpsest.kernels.sparse_attend.amx_join import join
from palimpsest.kernels.sparse_attend.amx_kernel import attend, finish_head, load_queries


@kernel("i8(i4[:,::1], i4[::1], i8, i8, i8, i4[::1], u2[:,::1], u8[::1], i4[::1], i4[::1], i4[::1])")
def join_rows(ids, counts, lanes, heads, most, union, masks, bits, before, places, ends):
    """``amx_join.join`` of at most ``most`` distinct ids."""
    return join(ids, counts, lanes, heads, union[:most], masks, bits, before, places, ends)


@kernel(
    "void(u1[:,::1], i4[::1], u2[:,::1], i4[::1], i8, u2[:,:,::1], f4[:,:,::1], i8, i8, f4, f4, u8[::1], u2[:,:,:,:,::1], u2[:,::1],"
    " u2[::1], f4[:,::1], u2[:,::1], f4[:,::1], f4[:,:,::1], u1[::1])"
)
def attend_union(
    history, union, masks, counts, lanes, query, context, kind, latent, scale, factor,
    records, queries, wide, pairs, scores, p, totals, state, staging,
):  # fmt: skip
    """Context [m, heads, latent] of m rows over the records ``union`` [n]; masks [>= n rounded up to 64, head tiles]."""
    rope, base, pitch, count = query.shape[2] - latent, history.ctypes.data, history.shape[1], union.shape[0]
    tile_begin()
    for j in range(count):
        records[j] = base + np.uint64(union[j]) * np.uint64(pitch)
    for j in range(count, (count + 63) // 64 * 64):
        for tile in range(masks.shape[1]):
            masks[j, tile] = 0
    for row in range(query.shape[0]):
        load_queries(query[row], row * lanes, queries)
    attend(records[:count], kind, latent, rope, scale, queries, masks, wide, pairs, scores, p, totals, state, staging)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            if counts[row] > 0:
                finish_head(totals, state, row * lanes + head, factor, context[row, head])
            else:
                for column in range(latent):
                    context[row, head, column] = np.float32(0)
    tile_end()
