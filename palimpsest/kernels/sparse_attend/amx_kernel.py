"""sparse_attend on AMX: gather, decode, query . key, online softmax and p @ value of one row at a time, without a lock or an
allocation.

``amx-1`` attention: blocks of BLOCK ids in emitted order; logits are TDPBF16PS dots of bf16 query and record (32 elements at a
time, in order);
p is rounded to bf16 and the row sum adds the rounded p; p @ value adds 32 ids at a time to fp32; a new maximum rescales sum and
output once
per block. Short blocks are padded with zero records of negligible p, which changes no bit. Heads never meet, so a head's bits
do not depend
on how many others its rank holds.
"""

from typing import Annotated, NamedTuple

import numpy as np

from palimpsest.kernels.amx_ir import tile_begin, tile_dot, tile_end, tile_load, tile_store, tile_zero
from palimpsest.kernels.avx512_decode import pair_rows
from palimpsest.kernels.jit import Array, kernel, piece
from palimpsest.kernels.sizes import AMX_ID_BLOCK
from palimpsest.kernels.sparse_attend.avx512_records import AHEAD, Form, gather
from palimpsest.kernels.sparse_attend.avx512_softmax import LOW, finish_head, scale_row, softmax16, softmax16_masked

#: ids of one block of the online softmax: part of the arithmetic
BLOCK = AMX_ID_BLOCK


class Work(NamedTuple):
    """Scratch of one thread, heads in whole tiles of 16 and elements in whole 64.

    records [ids]: addresses; queries [tiles, steps, 16 pairs, 16 heads, 2], wide [BLOCK, dim]: bf16 operands, zero past the
    real elements;
    pairs: 64 columns of the block's values as right tiles; scores [BLOCK, heads]; p [heads, BLOCK] bf16; totals [heads, latent];
    state [tiles, 3, 16]: maximum, sum, rescaling; staging [128]; everyone [0, tiles]: the mask of a row alone
    """

    records: Annotated[Array, "u8[::1]"]
    queries: Annotated[Array, "u2[:,:,:,:,::1]"]
    wide: Annotated[Array, "u2[:,::1]"]
    pairs: Annotated[Array, "u2[::1]"]
    scores: Annotated[Array, "f4[:,::1]"]
    p: Annotated[Array, "u2[:,::1]"]
    totals: Annotated[Array, "f4[:,::1]"]
    state: Annotated[Array, "f4[:,:,::1]"]
    staging: Annotated[Array, "u1[::1]"]
    everyone: Annotated[Array, "u2[:,::1]"]


@piece
def load_queries(queries, first_head, wide):
    """Queries [h, dim] as right tiles wide[head tile, step, 16 pairs, 16 heads, 2], put at virtual head ``first_head``."""
    heads, dim = queries.shape
    for head in range(heads):
        tile, lane = (first_head + head) // 16, (first_head + head) % 16
        for pair in range(dim // 2):
            wide[tile, pair // 16, pair % 16, lane, 0] = queries[head, 2 * pair]
            wide[tile, pair // 16, pair % 16, lane, 1] = queries[head, 2 * pair + 1]
        if dim % 2:
            wide[tile, dim // 32, dim // 2 % 16, lane, 0] = queries[head, dim - 1]


@piece
def _logits_one(records, queries, scores, width, steps):
    """64 tokens against 16 heads -> scores [64, 16]."""
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)
    down = np.uint64(16 * width)
    for step in range(steps):
        at = records + np.uint64(64 * step)
        tile_load(7, queries + np.uint64(1024 * step), 64)
        tile_load(4, at, width)
        tile_dot(0, 4, 7)
        tile_load(5, at + down, width)
        tile_dot(1, 5, 7)
        tile_load(6, at + down * np.uint64(2), width)
        tile_dot(2, 6, 7)
        tile_load(4, at + down * np.uint64(3), width)
        tile_dot(3, 4, 7)
    tile_store(0, scores, 64)
    tile_store(1, scores + np.uint64(1024), 64)
    tile_store(2, scores + np.uint64(2048), 64)
    tile_store(3, scores + np.uint64(3072), 64)


@piece
def _logits_two(records, queries, scores, width, steps, stride):
    """32 tokens against 32 heads -> scores [32, 32], rows of ``stride`` bytes."""
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)
    for step in range(steps):
        at = records + np.uint64(64 * step)
        tile_load(4, at, width)
        tile_load(6, queries + np.uint64(1024 * step), 64)
        tile_dot(0, 4, 6)
        tile_load(5, at + np.uint64(16 * width), width)
        tile_dot(1, 5, 6)
        tile_load(7, queries + np.uint64(1024 * (steps + step)), 64)
        tile_dot(2, 4, 7)
        tile_dot(3, 5, 7)
    down = np.uint64(16 * stride)
    tile_store(0, scores, stride)
    tile_store(1, scores + down, stride)
    tile_store(2, scores + np.uint64(64), stride)
    tile_store(3, scores + down + np.uint64(64), stride)


@piece
def _values_one(p, values, out, tokens, pitch, width):
    """16 heads += p [16, tokens] @ values [tokens, 64]; ``out`` rows are ``width`` bytes."""
    tile_load(0, out, width)
    tile_load(1, out + np.uint64(64), width)
    tile_load(2, out + np.uint64(128), width)
    tile_load(3, out + np.uint64(192), width)
    for step in range(tokens // 32):
        at = values + np.uint64(4096 * step)
        tile_load(4, p + np.uint64(64 * step), pitch)
        tile_load(5, at, 256)
        tile_dot(0, 4, 5)
        tile_load(6, at + np.uint64(64), 256)
        tile_dot(1, 4, 6)
        tile_load(7, at + np.uint64(128), 256)
        tile_dot(2, 4, 7)
        tile_load(5, at + np.uint64(192), 256)
        tile_dot(3, 4, 5)
    tile_store(0, out, width)
    tile_store(1, out + np.uint64(64), width)
    tile_store(2, out + np.uint64(128), width)
    tile_store(3, out + np.uint64(192), width)


@piece
def _values_two(p, values, out, tokens, pitch, width):
    """32 heads += p [32, tokens] @ values [tokens, 32 of 64]."""
    down, p_down = np.uint64(16 * width), np.uint64(16 * pitch)
    tile_load(0, out, width)
    tile_load(1, out + np.uint64(64), width)
    tile_load(2, out + down, width)
    tile_load(3, out + down + np.uint64(64), width)
    for step in range(tokens // 32):
        at = values + np.uint64(4096 * step)
        tile_load(4, p + np.uint64(64 * step), pitch)
        tile_load(6, at, 256)
        tile_dot(0, 4, 6)
        tile_load(7, at + np.uint64(64), 256)
        tile_dot(1, 4, 7)
        tile_load(5, p + p_down + np.uint64(64 * step), pitch)
        tile_dot(2, 5, 6)
        tile_dot(3, 5, 7)
    tile_store(0, out, width)
    tile_store(1, out + np.uint64(64), width)
    tile_store(2, out + down, width)
    tile_store(3, out + down + np.uint64(64), width)


@piece
def _logits(work, count, padded):
    """scores [padded, heads] of the decoded block; LOW for the padding."""
    queries, scores = work.queries, work.scores
    width, tiles, steps, stride = 2 * work.wide.shape[1], queries.shape[0], queries.shape[1], 4 * scores.shape[1]
    record, query, score = work.wide.ctypes.data, queries.ctypes.data, scores.ctypes.data
    if tiles == 1:
        for t in range(0, padded, 64):
            _logits_one(record + np.uint64(t * width), query, score + np.uint64(t * stride), width, steps)
    else:
        for t in range(0, padded, 32):
            for tile in range(0, tiles, 2):
                at, to = query + np.uint64(1024 * steps * tile), score + np.uint64(t * stride + 64 * tile)
                _logits_two(record + np.uint64(t * width), at, to, width, steps, stride)
    for t in range(count, padded):
        for head in range(scores.shape[1]):
            scores[t, head] = np.float32(LOW)


@piece
def _values(work, padded):
    """totals [heads, latent] += p [heads, padded] @ the block's values, 64 columns at a time."""
    wide, pairs, p, totals = work.wide, work.pairs, work.p, work.totals
    width, pitch, tiles, row = np.uint64(2 * wide.shape[1]), 2 * p.shape[1], p.shape[0] // 16, 4 * totals.shape[1]
    record, value, probability, total = wide.ctypes.data, pairs.ctypes.data, p.ctypes.data, totals.ctypes.data
    for column in range(0, totals.shape[1], 64):
        at, to = record + np.uint64(2 * column), value
        for _ in range(0, padded, 2):
            pair_rows(at, at + width, to)
            at += width + width
            to += np.uint64(256)
        out = total + np.uint64(4 * column)
        if tiles == 1:
            _values_one(probability, value, out, padded, pitch, row)
            continue
        for tile in range(0, tiles, 2):
            head, left = out + np.uint64(16 * tile * row), probability + np.uint64(16 * tile * pitch)
            _values_two(left, value, head, padded, pitch, row)
            _values_two(left, value + np.uint64(128), head + np.uint64(128), padded, pitch, row)


@piece
def _softmax(work, masks, first, padded, scale):
    """p of the block and the running state of all heads; what was summed before is rescaled where a maximum grew."""
    scores, p, state, totals = work.scores, work.p, work.state, work.totals
    stride, masked, mask_stride = 4 * scores.shape[1], masks.shape[0] > 0, 2 * masks.shape[1]
    for tile in range(state.shape[0]):
        at, out = scores.ctypes.data + np.uint64(64 * tile), p.ctypes.data + np.uint64(32 * tile * p.shape[1])
        held, mask = state[tile].ctypes.data, masks.ctypes.data + np.uint64(first * mask_stride + 2 * tile)
        if masked:
            rescale = softmax16_masked(at, stride, padded, scale, held, out, mask)
        else:
            rescale = softmax16(at, stride, padded, scale, held, out, mask)
        if rescale:
            for lane in range(16):
                scale_row(totals[16 * tile + lane].ctypes.data, state[tile, 2, lane], totals.shape[1])


@piece
def attend(records, masks, form, work):
    """Attention of all heads of ``work.queries`` over the records at the addresses ``records``; totals and state hold the result.

    masks [ids or 0, head tiles] u2: which heads attend an id; without rows every head attends every id
    """
    state, totals, ids = work.state, work.totals, records.shape[0]
    for tile in range(state.shape[0]):
        for lane in range(16):
            state[tile, 0, lane], state[tile, 1, lane] = np.float32(-1e30), np.float32(0)
    for head in range(totals.shape[0]):
        for column in range(totals.shape[1]):
            totals[head, column] = np.float32(0)
    for first in range(0, ids, BLOCK):
        count = min(BLOCK, ids - first)
        padded = (count + 63) // 64 * 64
        gather(records, first, count, padded, 0, form, work, AHEAD)
        _logits(work, count, padded)
        _softmax(work, masks, first, padded, np.float32(form.scale))
        _values(work, padded)


@kernel("u1[:,::1]", "i4[:,::1]", "i4[::1]", "u2[:,:,::1]", "f4[:,:,::1]", Form, Work)
def attend_rows(history, ids, counts, query, context, form, work):
    """Context [m, heads, latent] of rows with ids [m, topk], the first ``counts`` of each real; a row without any gives zeros."""
    base, pitch = history.ctypes.data, history.shape[1]
    tile_begin()
    for row in range(ids.shape[0]):
        count = counts[row]
        if count == 0:
            for head in range(context.shape[1]):
                for column in range(context.shape[2]):
                    context[row, head, column] = np.float32(0)
            continue
        for j in range(count):
            work.records[j] = base + np.uint64(ids[row, j]) * np.uint64(pitch)
        load_queries(query[row], 0, work.queries)
        attend(work.records[:count], work.everyone, form, work)
        for head in range(context.shape[1]):
            finish_head(work, head, np.float32(form.factor), context[row, head])
    tile_end()
