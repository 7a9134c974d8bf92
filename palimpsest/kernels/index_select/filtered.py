"""index_select of fp8 records, portable engine: filter by fast fp32 scores with a derived error bound, decide by exact ones.

Per group of rows and tile of keys: fp32 GEMMs, relu, the head sum, and limits of the exact score (``certificate``). A key below
the row's running k-th lower limit is dropped at once. At the end, or when a row's candidates do not fit, the keys whose order
against the cutoff the limits leave open are scored exactly, each at most once (``candidates``, ``rescore``). So the result is
that of the exact scores, whatever the tiles, and no approximate number leaves this file.

Exact scores take the place of both limits where the bound says nothing: NaN codes, scales or weights that are not finite or are
extreme; rows of nearly equal scores, once that is seen; fp32 GEMMs that the process let round their inputs; and a watched call,
whose taps show the exact scores."""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.fp8 import Decoder
from palimpsest.kernels.index_select import certificate
from palimpsest.kernels.index_select.candidates import Candidates
from palimpsest.kernels.index_select.rescore import Rescore
from palimpsest.kernels.sizes import (
    EXACT_KEYS,
    FILTER_BLOCK,
    FILTER_COLUMNS,
    FILTER_KEYS,
    KEY_TILE,
    SELECT_ROWS,
    filter_dots,
    filter_rows,
    filter_step,
)


class _Fast:
    """Fast scores of the rows of a group, and their limits.

    region: the dots of one GEMM; while keys are loaded, their largest magnitudes; between GEMMs the scratch of exact scores
    """

    __slots__ = ("call", "decode", "heads", "keys", "mass", "queries", "reach", "region", "slack", "step", "weights")

    def __init__(self, call: Call, rows: int):
        scratch, heads, dim = call.scratch, call.params["heads"], call.params["dim"]
        self.call, self.heads, self.step = call, heads, filter_step(heads)
        self.slack = np.float32(certificate.slack(heads, dim))
        self.decode = Decoder(scratch, max(EXACT_KEYS * dim, heads * dim, FILTER_KEYS), "fp32")
        self.queries = scratch.take((rows, heads, dim), "fp32")
        self.weights = scratch.take((rows, heads), "fp32")
        self.mass = scratch.take((rows,), "fp32")
        self.keys = scratch.take((FILTER_KEYS, dim), "fp32")
        self.reach = scratch.take((FILTER_KEYS,), "fp32")
        self.region = scratch.take((filter_dots(heads, dim),), "u8")

    def load(self, i: int, slot: int, mass: float) -> None:
        """Row ``slot`` of the slice as row ``i`` of the group."""
        self.decode(self.call.view("index_query")[slot].view(torch.uint8), self.queries[i])
        self.weights[i].copy_(self.call.view("head_weights")[slot])
        self.mass.numpy()[i] = mass + certificate.TINY

    def load_keys(self, start: int, width: int) -> bool:
        """Keys as fp32 and how far each reaches in the bound; False when one of them is outside what the bound covers."""
        keys = self.call.view("index_history", "keys")[start : start + width].view(torch.uint8)
        peaks, room = self.region[:width], self.region[FILTER_KEYS:]
        for first in range(0, width, EXACT_KEYS):
            codes = keys[first : min(first + EXACT_KEYS, width)]
            end = first + codes.shape[0]
            self.decode(codes, self.keys[first:end])
            magnitudes = room[: codes.numel()].view(codes.shape)
            np.bitwise_and(codes.numpy(), np.uint8(0x7F), out=magnitudes.numpy())
            torch.amax(magnitudes, 1, out=peaks[first:end])
        scales, reach = self.call.view("index_history", "scales").numpy()[start : start + width], self.reach.numpy()[:width]
        if peaks.numpy().max() == 0x7F or not certificate.TINY <= scales.min() <= scales.max() <= certificate.HUGE:
            return False
        self.decode(peaks, self.reach[:width])
        np.multiply(reach, scales, out=reach)
        np.multiply(reach, self.slack, out=reach)
        return True

    def limits(self, rows: range, start: int, lows: torch.Tensor, highs: torch.Tensor, bound: torch.Tensor) -> None:
        """Limits [rows, width] of the exact scores of ``rows`` for the loaded keys, which start at ``start``."""
        width = lows.shape[1]
        scales = self.call.view("index_history", "scales")[start : start + width]
        for first in range(rows[0], rows[-1] + 1, self.step):
            part = slice(first, min(first + self.step, rows[-1] + 1))
            count, lines = part.stop - first, slice(first - rows[0], part.stop - rows[0])
            queries, weights = self.queries[part].view(count * self.heads, -1), self.weights[part].unsqueeze(1)
            for left in range(0, width, FILTER_COLUMNS):
                right = min(left + FILTER_COLUMNS, width)
                shape = (count, self.heads, right - left)
                dots = self.region.view(torch.float32)[: math.prod(shape)].view(shape)
                sums = bound.view(-1)[: count * (right - left)].view(count, 1, right - left)
                torch.mm(queries, self.keys[left:right].t(), out=dots.view(-1, right - left))
                torch.relu_(dots)
                torch.bmm(weights, dots, out=sums)
                torch.mul(sums[:, 0], scales[left:right], out=highs[lines, left:right])
        torch.mul(self.mass[rows[0] : rows[-1] + 1].unsqueeze(1), self.reach[:width], out=bound)
        torch.sub(highs, bound, out=lows)
        torch.add(highs, bound, out=highs)


class _Tile(NamedTuple):
    start: int
    width: int
    covered: bool


class _Group:
    """Scratch of one call, carved once, and the rows loaded into it."""

    __slots__ = ("bounded", "candidates", "fast", "limits", "rescore", "rows", "shown", "slot")

    def __init__(self, call: Call):
        scratch, p = call.scratch, call.params
        topk, heads, dim = p["topk"], p["heads"], p["dim"]
        scratch.reset()
        fast = fp32_is_fp32() and not call.watched
        self.rows = filter_rows(topk, heads, dim) if fast else min(SELECT_ROWS, filter_rows(topk, heads, dim))
        columns = EXACT_KEYS if fast else FILTER_KEYS
        decode = Decoder(scratch, max(columns, heads) * dim, "fp64")
        self.fast = _Fast(call, self.rows) if fast else None
        self.rescore = Rescore(call, Scratch(self.fast.region) if self.fast else scratch, decode, columns)
        self.bounded = [False] * self.rows
        self.limits = scratch.take((3 * FILTER_BLOCK * FILTER_KEYS,), "fp32")
        self.shown = None if fast else scratch.take((SELECT_ROWS, KEY_TILE), "fp32")
        self.candidates = Candidates(scratch, self.rows, topk, self.rescore)
        self.slot = 0

    def load(self, slot: int, count: int) -> None:
        """Rows ``slot`` .. of the slice, without candidates."""
        self.slot = slot
        self.rescore.forget()
        self.candidates.reset(slot)
        if self.fast is None:
            return
        for i in range(count):
            mass = self.rescore.mass(slot + i)
            self.bounded[i] = certificate.bounded(mass)
            if self.bounded[i]:
                self.fast.load(i, slot + i, mass)

    def without_nan(self, scores: np.ndarray) -> int:
        """Turn NaN into -inf; returns how many there were."""
        lost = self.candidates.passing.numpy()[: len(scores)]
        np.isnan(scores, out=lost)
        np.copyto(scores, np.float32(-np.inf), where=lost)
        return int(np.count_nonzero(lost))


def select(call: Call, chunk: Chunk, rows: range) -> None:
    """Rows ``rows`` of the chunk, which are this rank's, in groups of equal size; the tap ``selected`` after each."""
    group = _Group(call)
    parts = -(-len(rows) // group.rows)
    bounds = [len(rows) * i // parts for i in range(parts + 1)]
    for first, end in pairwise(bounds):
        nans = call.view("local_counts", "nans").numpy()[first:end]
        nans.fill(0)
        group.load(first, end - first)
        (_watched if call.watched else _stream)(group, chunk, rows[first:end], nans)
        for i in range(end - first):
            _emit(call, first + i, group.candidates.finish(i))
        call.tap("selected", rows=rows[first:end])


def _stream(group: _Group, chunk: Chunk, rows: range, nans: np.ndarray) -> None:
    end = chunk.history + rows[-1] + 1
    for start in range(0, end, FILTER_KEYS):
        width = min(FILTER_KEYS, end - start)
        tile = _Tile(start, width, group.fast is not None and group.fast.load_keys(start, width))
        group.rescore.forget()
        for first in range(0, len(rows), FILTER_BLOCK):
            _offer(group, chunk, rows, range(first, min(first + FILTER_BLOCK, len(rows))), tile, nans)


def _offer(group: _Group, chunk: Chunk, rows: range, part: range, tile: _Tile, nans: np.ndarray) -> None:
    """Rows ``part`` of the group against one tile of keys."""
    start, width, covered = tile
    lows, highs, bound = group.limits[: 3 * len(part) * width].view(3, len(part), width)
    fast = [covered and group.bounded[i] and not group.candidates.blurred[i] for i in part]
    if group.fast and any(fast):
        group.fast.limits(part, start, lows, highs, bound)
        group.rescore.forget()
    seen = [max(0, min(width, chunk.history + rows[i] + 1 - start)) for i in part]
    for first in range(0, width, EXACT_KEYS):
        for line, i in enumerate(part):
            if not fast[line] and seen[line] > first:
                scores = highs.numpy()[line, first : min(first + EXACT_KEYS, seen[line])]
                group.rescore.tile_scores(group.slot + i, start + first, scores)
                nans[i] += group.without_nan(scores)
    for line in range(len(part)):
        if not fast[line]:
            lows[line].copy_(highs[line])
        highs.numpy()[line, seen[line] :] = np.nan
    group.candidates.offer(part[0], lows, highs, start)


def _watched(group: _Group, chunk: Chunk, rows: range, nans: np.ndarray) -> None:
    """Exact scores of every key, tile by tile, shown before they are ranked."""
    call, end = group.rescore.call, chunk.history + rows[-1] + 1
    assert group.shown is not None
    seen = [chunk.history + row + 1 for row in rows]
    for start in range(0, end, KEY_TILE):
        for first in range(start, min(start + KEY_TILE, end), FILTER_KEYS):
            for i in range(len(rows)):
                if (count := min(FILTER_KEYS, seen[i] - first)) > 0:
                    part = group.shown[i, first - start : first - start + count].numpy()
                    group.rescore.tile_scores(group.slot + i, first, part)
        for i, row in enumerate(rows):
            if (count := min(KEY_TILE, seen[i] - start)) <= 0:
                continue
            scores = group.shown[i, :count]
            shown = scores.numpy().view()
            shown.flags.writeable = False
            call.tap("scores", row=row, start=start, scores=shown)
            nans[i] += group.without_nan(scores.numpy())
            for first in range(0, count, FILTER_KEYS):
                piece = scores[first : first + FILTER_KEYS].unsqueeze(0)
                group.candidates.offer(i, piece, piece, start + first)


def _emit(call: Call, slot: int, best: np.ndarray) -> None:
    ids = call.view("local_ids").numpy()[slot]
    np.copyto(ids[: len(best)], best)
    ids[len(best) :].fill(-1)
    call.view("local_counts", "counts").numpy()[slot] = len(best)


def fp32_is_fp32() -> bool:
    """Whether fp32 matrix products are that: a process may let torch round their inputs to bf16 or tf32."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return getattr(matmul, "fp32_precision", "none") in ("none", "ieee")
