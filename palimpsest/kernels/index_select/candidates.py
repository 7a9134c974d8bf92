"""Candidates of the portable filter: keys that may be among a row's top-k, each with limits of its exact score.

A key whose exact score is known has equal limits. Ids of a row ascend: keys are offered in ascending order, and dropping keeps
the order, so that among equal scores the first ones win."""

import numpy as np
import torch

from palimpsest.core.errors import PalimpsestError
from palimpsest.kernels.call import Scratch
from palimpsest.kernels.index_select.rescore import Rescore
from palimpsest.kernels.sizes import EXACT_KEYS, FILTER_BLOCK, FILTER_KEYS, filter_capacity


class Candidates:
    """The candidates of a group of ``rows`` rows. (Slots, here and beside: a call makes few Python objects, and no dicts.)

    rescore: what scores candidates exactly; it covers ``EXACT_KEYS`` keys at once, or more
    """

    __slots__ = (
        "asked", "blurred", "capacity", "floor", "fresh", "held", "kept", "masks", "passing", "places", "rescore", "slot",
        "spare", "state", "topk",
    )  # fmt: skip

    def __init__(self, scratch: Scratch, rows: int, topk: int, rescore: Rescore):
        capacity, offered = filter_capacity(topk), FILTER_BLOCK * FILTER_KEYS
        self.topk, self.capacity, self.rescore = topk, capacity, rescore
        # per row: lower limits, upper limits, ids; ``state`` has the bits of all three
        self.state = scratch.take((rows, 3, capacity), "i32")
        self.floor = scratch.take((rows,), "fp32")
        self.held, self.slot = [0] * rows, 0
        #: rows whose scores lie so close together that the limits decide little: score their later keys exactly at once
        self.blurred = [False] * rows
        # one offer
        self.passing = scratch.take((offered,), "u8").view(torch.bool)
        self.places = scratch.take((offered,), "i64")
        self.fresh = scratch.take((3 * offered,), "i32")
        # one row
        self.spare = scratch.take((capacity,), "fp32")
        self.kept = scratch.take((capacity,), "i64")
        self.masks = scratch.take((3, capacity), "u8").view(torch.bool)
        self.asked = scratch.take((3, EXACT_KEYS), "i32")

    def reset(self, slot: int) -> None:
        """Forget all candidates; the group's rows are now those of the slice from ``slot``."""
        self.slot = slot
        self.held = [0] * len(self.held)
        self.blurred = [False] * len(self.held)
        self.floor.numpy().fill(-np.inf)

    def offer(self, first: int, lows: torch.Tensor, highs: torch.Tensor, start: int) -> None:
        """Limits [n, width] of rows ``first`` and on for the keys from ``start``; a NaN in ``highs`` is a key the row does not
        see."""
        rows, width = highs.shape
        passing = self.passing[: rows * width]
        torch.ge(highs, self.floor[first : first + rows].unsqueeze(1), out=passing.view(rows, width))
        found = _places(passing, self.places)
        if not (count := found.shape[0]):
            return
        fresh = self.fresh[: 3 * count].view(3, count)
        torch.index_select(lows.view(-1), 0, found, out=fresh[0].view(torch.float32))
        torch.index_select(highs.view(-1), 0, found, out=fresh[1].view(torch.float32))
        places, values, state = found.numpy(), fresh.numpy(), self.state.numpy()
        np.copyto(values[2], places, casting="same_kind")
        begin = 0
        for row, end in enumerate(np.searchsorted(places, range(width, (rows + 1) * width, width)).tolist(), first):
            if end > begin:
                if self.held[row] + end - begin > self.capacity:
                    self._make_room(row)
                held = self.held[row]
                self.held[row] = held + end - begin
                new = state[row, :, held : self.held[row]]
                np.copyto(new, values[:, begin:end])
                ids = new[2]
                np.add(ids, start - (row - first) * width, out=ids)
            begin = end

    def finish(self, row: int) -> np.ndarray:
        """The selected ids, ascending; at most topk."""
        if self.held[row] > self.topk:
            self._settle(row)
        return self.state.numpy()[row, 2, : self.held[row]]

    def _limits(self, row: int) -> torch.Tensor:
        """Lower and upper limits [2, held] of a row."""
        return self.state[row, :2, : self.held[row]].view(torch.float32)

    def _make_room(self, row: int) -> None:
        """Drop what can no longer be selected, and when a tile still does not fit, everything but the topk best."""
        lows, highs = self._limits(row).numpy()
        floor = self._largest(lows, self.topk)
        self.floor.numpy()[row] = floor
        mask = self.masks[0, : len(highs)]
        np.greater_equal(highs, floor, out=mask.numpy())
        self._keep(row, mask)
        if self.held[row] + FILTER_KEYS > self.capacity:
            self._settle(row)

    def _settle(self, row: int) -> None:
        """Keep exactly the topk best of more than topk candidates: the certain ones, and the best of the rest by exact score."""
        self._mark(row)
        self._ask(row, _places(self.masks[2, : self.held[row]], self.kept))
        self._decide(row)
        self._keep(row, self.masks[0, : self.held[row]])

    def _mark(self, row: int) -> None:
        """``masks``: certain to be selected; neither that nor certain not to be; of the latter, those not yet scored exactly."""
        lows, highs = self._limits(row).numpy()
        sure, open_, inexact = self.masks.numpy()[:, : len(lows)]
        floor, ceiling = self._largest(lows, self.topk), self._largest(highs, self.topk + 1)
        self.floor.numpy()[row] = floor
        # at most topk keys can score above ``ceiling``, and topk score at least ``floor``
        np.greater(lows, ceiling, out=sure)
        np.greater_equal(highs, floor, out=open_)
        np.greater(open_, sure, out=open_)
        np.less(lows, highs, out=inexact)
        np.logical_and(inexact, open_, out=inexact)

    def _decide(self, row: int) -> None:
        """The open candidates are exact: add the best of them to the certain ones, the first among equals."""
        highs = self._limits(row).numpy()[1]
        sure, open_, work = self.masks.numpy()[:, : len(highs)]
        wanted = self.topk - int(np.count_nonzero(sure))
        if not wanted:
            return
        values = self.spare.numpy()[: len(highs)]
        values.fill(-np.inf)
        np.copyto(values, highs, where=open_)
        values.partition(len(values) - wanted)
        cut = values[len(values) - wanted]
        self.floor.numpy()[row] = cut
        np.greater(highs, cut, out=work)
        np.logical_and(work, open_, out=work)
        np.logical_or(sure, work, out=sure)
        np.equal(highs, cut, out=work)
        np.logical_and(work, open_, out=work)
        ties = _places(self.masks[2, : len(highs)], self.kept).numpy()
        np.put(sure, ties[: self.topk - int(np.count_nonzero(sure))], True)

    def _ask(self, row: int, places: torch.Tensor) -> None:
        """Put the exact score in place of both limits. (A candidate with limits apart has a finite score.)"""
        state = self.state[row]
        self.blurred[row] |= places.shape[0] > FILTER_KEYS // 2
        for first in range(0, places.shape[0], EXACT_KEYS):
            part = places[first : first + EXACT_KEYS]
            asked = self.asked[:, : part.shape[0]]
            for values, target in zip(state, asked, strict=True):
                torch.index_select(values, 0, part, out=target)
            scores = self.rescore.picked_scores(self.slot + row, asked[2])
            low, high = (asked[i].numpy().view(np.float32) for i in range(2))
            if np.count_nonzero(low <= scores) + np.count_nonzero(scores <= high) < 2 * len(scores):
                raise _unsound(asked[2].numpy(), low, scores, high)
            for limit in self._limits(row).numpy():
                np.put(limit, part.numpy(), scores)

    def _keep(self, row: int, mask: torch.Tensor) -> None:
        kept = _places(mask, self.kept)
        count = kept.shape[0]
        if count < mask.shape[0]:
            spare = self.spare[:count].view(torch.int32)
            for values in self.state[row]:
                torch.index_select(values, 0, kept, out=spare)
                values[:count].copy_(spare)
        self.held[row] = count

    def _largest(self, values: np.ndarray, rank: int) -> np.float32:
        """The ``rank``-th largest of at least ``rank`` values."""
        spare = self.spare.numpy()[: len(values)]
        np.copyto(spare, values)
        spare.partition(len(values) - rank)
        return spare[len(values) - rank]


def _places(mask: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Indices of the true elements, int64 at the start of ``out``, which holds at least as many: ``nonzero`` sizes an empty view
    of it within its own storage."""
    found = out[:0]
    torch.nonzero(mask, out=found)
    return found.view(-1)


def _unsound(ids: np.ndarray, lows: np.ndarray, scores: np.ndarray, highs: np.ndarray) -> PalimpsestError:
    at = int(np.flatnonzero(~((lows <= scores) & (scores <= highs)))[0])
    return PalimpsestError(
        f"index_select: token {ids[at]} scores {scores[at]}, outside the limits {lows[at]} to {highs[at]} of its fp32 score; "
        "this machine's fp32 matrix products lose more than fp32 does: set torch.backends.mkldnn.matmul.fp32_precision to 'ieee'"
    )
