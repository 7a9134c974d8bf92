"""What the selector really ranked: a digest of every row's visible scores, and the rows themselves in blocks.

The scores of a chunk (rows x tokens) are never held together. Tiles arrive through the tap in key order; a block of at most
``SELECT_ROWS`` rows
is assembled, handed to a judge once its ids are written (the ``selected`` event), and forgotten.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palimpsest.kernels.sizes import SELECT_ROWS


@dataclass
class RowScores:
    """Of one row: how many scores arrived, their digest, and their range (an NaN leaves the range unchanged and is counted)."""

    count: int
    digest: bytes
    low: float
    high: float
    nans: int


#: (first chunk row, per row its visible scores, per row what is kept of them)
Block = Callable[[int, list[NDArray[np.float32]], list[RowScores]], None]


class ScoreLog:
    """Assembles the tiles of one replay after the other.

    tokens: prepared tokens, the width of the private block buffer, which is there from the first tile of a replay until ``close``
    """

    def __init__(self, tokens: int):
        self.tokens = tokens
        self._store = np.empty((0, 0), np.float32)
        self.rows: dict[int, RowScores] = {}
        self.complaints: list[str] = []
        self._block: Block | None = None
        self._first: int | None = None
        self._filled = [0] * SELECT_ROWS

    def start(self, block: Block) -> None:
        """Begin a replay; ``block`` judges finished rows."""
        self.rows, self.complaints = {}, []
        self._block = block
        self._first, self._filled = None, [0] * SELECT_ROWS

    def tile(self, row: int, start: int, scores: NDArray[np.float32]) -> None:
        """Scores [n] of keys [start, start + n) for one chunk row, ascending in key order per row."""
        if self._first is None:
            self._first = row
        if not len(self._store):
            self._store = np.empty((SELECT_ROWS, self.tokens), np.float32)
        at = row - self._first
        assert 0 <= at < SELECT_ROWS, f"row {row} arrived in the block of row {self._first}"
        if start != self._filled[at]:
            self.complaints.append(f"row {row}: scores of keys from {start} arrived after {self._filled[at]} keys")
        stop = min(start + len(scores), self._store.shape[1])
        self._store[at, start:stop] = scores[: stop - start]
        self._filled[at] = stop

    def finish(self) -> None:
        """The ids of the block are written: digest and judge it, and clear it."""
        if self._first is None:
            return
        done: list[NDArray[np.float32]] = []
        first = self._first
        for at, count in enumerate(self._filled):
            if not count:
                break
            scores = self._store[at, :count]
            self.rows[first + at] = _row(scores)
            done.append(scores)
        if done and self._block is not None:
            self._block(first, done, [self.rows[first + at] for at in range(len(done))])
        self._first, self._filled = None, [0] * SELECT_ROWS

    def close(self) -> None:
        """The selection is over: give the block buffer back."""
        self._store = np.empty((0, 0), np.float32)


def _row(scores: NDArray[np.float32]) -> RowScores:
    nan = np.isnan(scores)
    nans = int(np.count_nonzero(nan))
    plain = scores if not nans else scores[~nan]
    low, high = (float(plain.min()), float(plain.max())) if len(plain) else (0.0, 0.0)
    return RowScores(len(scores), hashlib.blake2b(scores.data, digest_size=16).digest(), low, high, nans)
