"""index_select in plain loops that LLVM vectorises for whatever it finds (AVX512, AVX2, or neither): no intrinsic, so nothing can abort.

``avx-1`` scores: a dot adds its products in ascending order of the dim, in fp32 from +0 (products of e4m3 values are exact, so it does not matter
whether a machine fuses them); heads add in ascending order, one fp32 multiplication and one addition each, from +0; then times the key's scale.
``kernels/emulate.py`` does the same in numpy, bit for bit.
"""

import numpy as np

from palimpsest.kernels.avx_topk import LOWEST, compact, push_scores
from palimpsest.kernels.jit import exact_products, kernel, piece

#: keys whose partial dots stay in the first cache level
RUN = 256


@exact_products
def _dots(keys, first, width, query, head, dim, left, right):
    """left[:width], right[:width] = dots of heads ``head`` and ``head + 1`` with keys[:, first : first + width] [dim, tile]; dim % 8 == 0."""
    for j in range(width):
        left[j] = np.float32(0)
        right[j] = np.float32(0)
    for d in range(0, dim, 8):
        a0, a1, a2, a3 = query[head, d], query[head, d + 1], query[head, d + 2], query[head, d + 3]
        a4, a5, a6, a7 = query[head, d + 4], query[head, d + 5], query[head, d + 6], query[head, d + 7]
        b0, b1, b2, b3 = query[head + 1, d], query[head + 1, d + 1], query[head + 1, d + 2], query[head + 1, d + 3]
        b4, b5, b6, b7 = query[head + 1, d + 4], query[head + 1, d + 5], query[head + 1, d + 6], query[head + 1, d + 7]
        for j in range(width):
            c = first + j
            x, y, k = left[j], right[j], keys[d, c]
            x, y, k = x + a0 * k, y + b0 * k, keys[d + 1, c]
            x, y, k = x + a1 * k, y + b1 * k, keys[d + 2, c]
            x, y, k = x + a2 * k, y + b2 * k, keys[d + 3, c]
            x, y, k = x + a3 * k, y + b3 * k, keys[d + 4, c]
            x, y, k = x + a4 * k, y + b4 * k, keys[d + 5, c]
            x, y, k = x + a5 * k, y + b5 * k, keys[d + 6, c]
            x, y, k = x + a6 * k, y + b6 * k, keys[d + 7, c]
            left[j], right[j] = x + a7 * k, y + b7 * k


@piece
def _add_head(dots, weight, total, first, width):
    """total += weight * relu(dots), a NaN staying a NaN."""
    for j in range(width):
        dot = dots[j]
        total[first + j] += weight * (np.float32(0) if dot < np.float32(0) else dot)


@piece
def _scores(keys, query, weights, scales, scores, left, right, count):
    """scores[:count] of one row; ``query`` [heads, dim] with an even number of heads."""
    for j in range(count):
        scores[j] = np.float32(0)
    for first in range(0, count, RUN):
        width = min(RUN, count - first)
        for head in range(0, query.shape[0], 2):
            _dots(keys, first, width, query, head, query.shape[1], left, right)
            _add_head(left, weights[head], scores, first, width)
            _add_head(right, weights[head + 1], scores, first, width)
    for j in range(count):
        scores[j] = scores[j] * scales[j] + np.float32(0)


@kernel("void(u1[:,:,::1], f4[:,::1], f4[::1], f4[:,:,::1], f4[:,::1], i8[::1], i4[::1])")
def begin(queries, weights, table, wide, head_weights, held, least):
    """Decode a group's queries [m, heads, dim] e4m3 and copy its weights, zeros up to the padded sizes; forget all candidates."""
    rows, heads, dim = queries.shape
    for row in range(rows):
        for head in range(wide.shape[1]):
            for d in range(wide.shape[2]):
                wide[row, head, d] = table[queries[row, head, d]] if head < heads and d < dim else np.float32(0)
            head_weights[row, head] = weights[row, head] if head < heads else np.float32(0)
        held[row], least[row] = 0, LOWEST


@kernel(
    "void(u1[:,::1], f4[::1], i8[::1], i8, i8, f4[::1], f4[:,:,::1], f4[:,::1], f4[:,::1], f4[:,::1], f4[::1], f4[::1],"
    " i4[::1], i4[:,::1], i4[:,::1], i8[::1], i4[::1], i4[::1], i4[::1], i4[::1], i8)"
)
def pass_tiles(
    keys, scales, seen, start, stop, table, wide, head_weights, columns, scores, left, right,
    line, candidates, ids, held, least, work, sample, nans, topk,
):  # fmt: skip
    """Score tokens [start, stop) for a group and offer them to its candidates. Row i sees the first ``seen[i]`` tokens of all.

    columns [dim, tile]: the decoded keys of one tile; scores [1 or m, tile]: of the row at hand, or of every row when it has a row each
    """
    tile, dim = scores.shape[1], keys.shape[1]
    shared = scores.shape[0] == 1
    for first in range(start, stop, tile):
        count = min(tile, stop - first)
        for d in range(columns.shape[0]):
            for j in range(count):
                columns[d, j] = table[keys[first + j, d]] if d < dim else np.float32(0)
        for row in range(seen.shape[0]):
            visible = min(count, seen[row] - first)
            if visible <= 0:
                continue
            scored = scores[0 if shared else row]
            _scores(columns, wide[row], head_weights[row], scales[first : first + visible], scored, left, right, visible)
            count_now, least_now, lost = push_scores(
                scored, visible, first, line, candidates[row], ids[row], held[row], least[row], topk, work, sample
            )
            held[row], least[row] = count_now, least_now
            nans[row] += lost


@kernel("void(i4[:,::1], i4[:,::1], i8[::1], i4[::1], i4[::1], i8, i4[:,::1], i4[::1])")
def emit(candidates, ids, held, work, sample, topk, out, counts):
    """Write a group's ids [m, topk], ascending and padded with -1, and their counts [m]."""
    for row in range(out.shape[0]):
        count = held[row]
        if count > topk:
            compact(candidates[row], ids[row], count, topk, work, sample)
            count = topk
        counts[row] = count
        for j in range(topk):
            out[row, j] = ids[row, j] if j < count else np.int32(-1)
