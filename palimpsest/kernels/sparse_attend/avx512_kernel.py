"""sparse_attend with VDPBF16PS: gather, decode, query . key, online softmax and p @ value of one row at a time, without a lock
or an allocation.

``avx512-1`` attention: blocks of AMX_ID_BLOCK ids in emitted order. A logit is the sum of two chains of VDPBF16PS, over the
even and over the odd pairs of dims; p is rounded to bf16 and the row sum adds the rounded p; p @ value is one chain over the
block's pairs of ids from +0, added to what was summed before times its rescaling by one FMA. Short blocks are padded with
zero records whose p is zero, which changes no bit. Heads never meet, so a head's bits do not depend on how many others its
rank holds.
"""

from typing import Annotated, NamedTuple

import numpy as np

from palimpsest.kernels.avx512_decode import prefetch
from palimpsest.kernels.jit import Array, kernel, piece
from palimpsest.kernels.sizes import AMX_ID_BLOCK
from palimpsest.kernels.sparse_attend.avx512_ir import OCTET, add_values, dots_8x16, dots_8x16_ahead, dots_16x8
from palimpsest.kernels.sparse_attend.avx512_records import BF16, Form, gather
from palimpsest.kernels.sparse_attend.avx512_softmax import finish_head, read_address, softmax16

#: ids of one block of the online softmax: part of the arithmetic
BLOCK = AMX_ID_BLOCK
#: records decoded and multiplied together, so that they are still near
_NEAR = 16
#: how many records before it is decoded a record is asked for
_AHEAD = 32


class Work(NamedTuple):
    """Scratch of one thread, heads in whole tiles of 16 (queries: of 8), elements in whole 64.

    records [ids]: addresses; queries [octets, steps, 8 heads]: four bf16 dims a word; wide [BLOCK, dim]: bf16 records, zero past
    the real elements; scores [BLOCK, heads]; p [heads, BLOCK] bf16; totals [heads, latent]; state [tiles, 3, 16]: maximum, sum,
    rescaling; staging [128]; lines [steps]: addresses to ask for
    """

    records: Annotated[Array, "u8[::1]"]
    queries: Annotated[Array, "u8[:,:,::1]"]
    wide: Annotated[Array, "u2[:,::1]"]
    scores: Annotated[Array, "f4[:,::1]"]
    p: Annotated[Array, "u2[:,::1]"]
    totals: Annotated[Array, "f4[:,::1]"]
    state: Annotated[Array, "f4[:,:,::1]"]
    staging: Annotated[Array, "u1[::1]"]
    lines: Annotated[Array, "u8[::1]"]


@piece
def _load_queries(queries, work):
    """Queries [h, dim] as words of four dims, [octet, step, head]."""
    heads, dim = queries.shape
    for head in range(heads):
        octet, lane, at = head // OCTET, head % OCTET, queries[head].ctypes.data
        for step in range(dim // 4):
            work.queries[octet, step, lane] = read_address(at + np.uint64(8 * step))
        if dim % 4:
            word = np.uint64(0)
            for d in range(dim // 4 * 4, dim):
                word |= np.uint64(queries[head, d]) << np.uint64(16 * (d % 4))
            work.queries[octet, dim // 4, lane] = word


@piece
def _ask_for(records, first, lines, steps, out):
    """Addresses of the lines of _NEAR records for the products to ask for, one a step; what is left over is asked for here.

    Asked for all at once they would wait for each other.
    """
    place = 0
    for t in range(first, min(first + _NEAR, records.shape[0])):
        for line in range(lines):
            at = records[t] + np.uint64(64 * line)
            if place < steps:
                out[place] = at
            else:
                prefetch(at)
            place += 1
    for i in range(place, steps):
        out[i] = records[0]


@piece
def _logits(records, first, count, padded, form, work):
    """Decode ids [first, first + count) and fill scores [padded, heads]; -inf for the padding."""
    queries, scores, wide = work.queries, work.scores, work.wide
    octets, steps, stride, width = queries.shape[0], queries.shape[1], 4 * scores.shape[1], 2 * wide.shape[1]
    ask, lines = work.lines.ctypes.data, (form.latent + form.rope) * (2 if form.kind == BF16 else 1) // 64
    query, base, to = queries.ctypes.data, wide.ctypes.data, scores.ctypes.data
    for t in range(0, padded, _NEAR):
        gather(records, first + t, min(_NEAR, max(count - t, 0)), _NEAR, t, form, work, 0)
        _ask_for(records, first + t + _AHEAD, lines, steps, work.lines)
        record, score = base + np.uint64(width * t), to + np.uint64(stride * t)
        if octets == 1:
            dots_16x8(record, width, query, steps, score, stride, ask)
        for octet in range(0, octets // 2 * 2, 2):
            at, some = query + np.uint64(64 * steps * octet), score + np.uint64(32 * octet)
            if octet:
                dots_8x16(record, width, at, steps, some, stride, ask)
            else:
                dots_8x16_ahead(record, width, at, steps, some, stride, ask)
            dots_8x16(record + np.uint64(8 * width), width, at, steps, some + np.uint64(8 * stride), stride, ask)
    for t in range(count, padded):
        for head in range(scores.shape[1]):
            scores[t, head] = np.float32(-np.inf)


@piece
def _softmax(work, padded, scale):
    """p of the block and the running state of all heads."""
    scores, p, state = work.scores.ctypes.data, work.p.ctypes.data, work.state.ctypes.data
    stride, held = 4 * work.scores.shape[1], np.uint64(32 * work.p.shape[1])
    for _ in range(work.state.shape[0]):
        softmax16(scores, stride, padded, scale, state, p, np.uint64(0))
        scores, p, state = scores + np.uint64(64), p + held, state + np.uint64(192)


@piece
def _values(work, heads, pairs):
    """totals [heads, latent] = totals * rescaling + p [heads, 2 pairs] @ the block's values."""
    strides = 2 * work.wide.shape[1], 4 * work.totals.shape[1]
    wide, totals, p, state = work.wide.ctypes.data, work.totals.ctypes.data, work.p.ctypes.data, work.state.ctypes.data
    for column in range(0, work.totals.shape[1], 64):
        for head in range(0, heads, OCTET):
            held, left = heads - head, p + np.uint64(2 * BLOCK * head)
            alphas = state + np.uint64(192 * (head // 16) + 128 + 4 * (head % 16))
            record, some = wide + np.uint64(2 * column), totals + np.uint64(strides[1] * head + 4 * column)
            if held <= 2:
                add_values(2, left, record, pairs, some, alphas, strides)
            elif held <= 4:
                add_values(4, left, record, pairs, some, alphas, strides)
            elif held <= 6:
                add_values(6, left, record, pairs, some, alphas, strides)
            else:
                add_values(8, left, record, pairs, some, alphas, strides)
                add_values(8, left, record + np.uint64(64), pairs, some + np.uint64(128), alphas, strides)


@piece
def _attend(records, heads, form, work):
    """Attention of ``heads`` heads over the records at the addresses ``records``; totals and state hold the result."""
    state, totals, ids = work.state, work.totals, records.shape[0]
    for tile in range(state.shape[0]):
        for lane in range(16):
            state[tile, 0, lane], state[tile, 1, lane] = np.float32(-np.inf), np.float32(0)
    for head in range(totals.shape[0]):
        for column in range(totals.shape[1]):
            totals[head, column] = np.float32(0)
    for first in range(0, ids, BLOCK):
        count = min(BLOCK, ids - first)
        padded = (count + 31) // 32 * 32
        _logits(records, first, count, padded, form, work)
        _softmax(work, padded, np.float32(form.scale))
        _values(work, heads, (count + 1) // 2)


@kernel("u1[:,::1]", "i4[:,::1]", "i4[::1]", "u2[:,:,::1]", "f4[:,:,::1]", Form, Work)
def attend_rows(history, ids, counts, query, context, form, work):
    """Context [m, heads, latent] of rows with ids [m, topk], the first ``counts`` of each real; a row without any gives zeros."""
    base, pitch = history.ctypes.data, history.shape[1]
    for row in range(ids.shape[0]):
        count = counts[row]
        if count == 0:
            for head in range(context.shape[1]):
                for column in range(context.shape[2]):
                    context[row, head, column] = np.float32(0)
            continue
        for j in range(count):
            work.records[j] = base + np.uint64(ids[row, j]) * np.uint64(pitch)
        _load_queries(query[row], work)
        _attend(work.records[:count], context.shape[1], form, work)
        for head in range(context.shape[1]):
            finish_head(work, head, np.float32(form.factor), context[row, head])
