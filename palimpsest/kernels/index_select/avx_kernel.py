"""index_select in plain loops that LLVM vectorises for whatever it finds (AVX512, AVX2, or neither): no intrinsic, so nothing
can abort.

``avx-1`` scores: a dot adds its products in ascending order of the dim, in fp32 from +0 (products of e4m3 values are exact, so
it does not matter
whether a machine fuses them); heads add in ascending order, one fp32 multiplication and one addition each, from +0; then times
the key's scale.
``kernels/emulate.py`` does the same in numpy, bit for bit.
"""

from typing import Annotated, NamedTuple

import numpy as np

from palimpsest.kernels.avx_topk import LOWEST, compact, push_scores
from palimpsest.kernels.jit import Array, exact_products, kernel, piece

#: keys whose partial dots stay in the first cache level
RUN = 512


class Group(NamedTuple):
    """Scratch of one thread: a group of m rows against one key tile.

    table [256]: values of the codes; wide [m, heads, dim], weights [m, heads]: heads and dims in whole fours; columns
    [tile/RUN, dim, RUN]: the
    decoded keys; scores [1 or more, tile]; sums [4, RUN]; line [tile]: the scores' keys; the rest as in ``amx_kernel.Group``
    """

    table: Annotated[Array, "f4[::1]"]
    wide: Annotated[Array, "f4[:,:,::1]"]
    weights: Annotated[Array, "f4[:,::1]"]
    columns: Annotated[Array, "f4[:,:,::1]"]
    scores: Annotated[Array, "f4[:,::1]"]
    sums: Annotated[Array, "f4[:,::1]"]
    line: Annotated[Array, "i4[::1]"]
    candidates: Annotated[Array, "i4[:,::1]"]
    ids: Annotated[Array, "i4[:,::1]"]
    held: Annotated[Array, "i8[::1]"]
    least: Annotated[Array, "i4[::1]"]
    seen: Annotated[Array, "i8[::1]"]
    work: Annotated[Array, "i4[::1]"]
    sample: Annotated[Array, "i4[::1]"]
    topk: Annotated[int, "i8"]


@exact_products
def _dots(keys, width, query, head, sums):
    """sums[i, :width] = dots of heads ``head`` + i, i < 4, with keys[:, :width] [dim, RUN]; the dim is a multiple of 4.

    Four heads share a key's loads and four dims share a sum's: what keeps the loop from waiting for the cache.
    """
    s0, s1, s2, s3 = sums[0], sums[1], sums[2], sums[3]
    for j in range(width):
        s0[j] = s1[j] = s2[j] = s3[j] = np.float32(0)
    for d in range(0, query.shape[1], 4):
        a0, a1, a2, a3 = query[head, d], query[head, d + 1], query[head, d + 2], query[head, d + 3]
        b0, b1, b2, b3 = query[head + 1, d], query[head + 1, d + 1], query[head + 1, d + 2], query[head + 1, d + 3]
        c0, c1, c2, c3 = query[head + 2, d], query[head + 2, d + 1], query[head + 2, d + 2], query[head + 2, d + 3]
        e0, e1, e2, e3 = query[head + 3, d], query[head + 3, d + 1], query[head + 3, d + 2], query[head + 3, d + 3]
        for j in range(width):
            w, x, y, z = s0[j], s1[j], s2[j], s3[j]
            k = keys[d, j]
            w, x, y, z = w + a0 * k, x + b0 * k, y + c0 * k, z + e0 * k
            k = keys[d + 1, j]
            w, x, y, z = w + a1 * k, x + b1 * k, y + c1 * k, z + e1 * k
            k = keys[d + 2, j]
            w, x, y, z = w + a2 * k, x + b2 * k, y + c2 * k, z + e2 * k
            k = keys[d + 3, j]
            s0[j], s1[j], s2[j], s3[j] = w + a3 * k, x + b3 * k, y + c3 * k, z + e3 * k


@piece
def _add_heads(sums, weights, head, total, width):
    """total += weights[head + i] * relu(sums[i]), heads ascending, a NaN staying a NaN."""
    zero, s0, s1, s2, s3 = np.float32(0), sums[0], sums[1], sums[2], sums[3]
    w0, w1, w2, w3 = weights[head], weights[head + 1], weights[head + 2], weights[head + 3]
    for j in range(width):
        value = total[j] + w0 * (zero if s0[j] < zero else s0[j])
        value += w1 * (zero if s1[j] < zero else s1[j])
        value += w2 * (zero if s2[j] < zero else s2[j])
        total[j] = value + w3 * (zero if s3[j] < zero else s3[j])


@piece
def _scores(columns, query, weights, scales, scores, sums, count):
    """scores[:count] of one row against columns [blocks, dim, RUN]; ``query`` [heads, dim], heads a multiple of 4."""
    for block in range((count + RUN - 1) // RUN):
        first, keys = block * RUN, columns[block]
        width, total = min(RUN, count - first), scores[first:]
        for j in range(width):
            total[j] = np.float32(0)
        for head in range(0, query.shape[0], 4):
            _dots(keys, width, query, head, sums)
            _add_heads(sums, weights, head, total, width)
    for j in range(count):
        scores[j] = scores[j] * scales[j] + np.float32(0)


@kernel(Group, "u1[:,:,::1]", "f4[:,::1]")
def begin(group, queries, weights):
    """Decode a group's queries [m, heads, dim] e4m3 and copy its weights, zeros up to the padded sizes; forget all candidates."""
    rows, heads, dim = queries.shape
    wide = group.wide
    for row in range(rows):
        for head in range(wide.shape[1]):
            for d in range(wide.shape[2]):
                wide[row, head, d] = group.table[queries[row, head, d]] if head < heads and d < dim else np.float32(0)
            group.weights[row, head] = weights[row, head] if head < heads else np.float32(0)
        group.held[row], group.least[row] = 0, LOWEST


@kernel(Group, "u1[:,::1]", "f4[::1]", "i8[::1]", "i8", "i8", "b1", "i4[::1]")
def pass_tiles(group, keys, scales, seen, start, stop, shared, nans):
    """Score tokens [start, stop) for a group and offer them to its candidates. Row i sees the first ``seen[i]`` tokens of all.

    shared: every row's scores overwrite the same line; else row i's stay in line i until the next tile
    """
    tile, dim, columns = group.scores.shape[1], keys.shape[1], group.columns
    for first in range(start, stop, tile):
        count = min(tile, stop - first)
        for at in range(0, count, 16):
            block, place = at // RUN, at % RUN
            for d in range(columns.shape[1]):
                for j in range(min(16, count - at)):
                    columns[block, d, place + j] = group.table[keys[first + at + j, d]] if d < dim else np.float32(0)
        for row in range(seen.shape[0]):
            visible = min(count, seen[row] - first)
            if visible > 0:
                line = group.scores[0 if shared else row]
                _scores(columns, group.wide[row], group.weights[row], scales[first : first + visible], line, group.sums, visible)
                nans[row] += push_scores(group, row, line, visible, first)


@kernel(Group, "i4[:,::1]", "i4[::1]")
def emit(group, out, counts):
    """Write a group's ids [m, topk], ascending and padded with -1, and their counts [m]."""
    topk = group.topk
    for row in range(out.shape[0]):
        count = group.held[row]
        if count > topk:
            compact(group.candidates[row], group.ids[row], count, topk, group.work, group.sample)
            count = topk
        counts[row] = count
        for j in range(topk):
            out[row, j] = group.ids[row, j] if j < count else np.int32(-1)
