"""Tie density and overlap: how often the cutoff falls into a tie, how often that tie is the ReLU's zero, how much neighbouring
rows share.

Measured on the scores that were really ranked (of a foreign selector: on their fp64 values), over every row of a slice;
integers only, and nothing here decides a verdict.
"""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class Density:
    """Counts over rows.

    rows, selecting:      rows seen; rows with more visible tokens than ids
    tied, zero_tied:      selecting rows whose cutoff score is held by more ids than places are left for it; of these, where it
    is zero members, needed:      ids holding the cutoff score in tied rows; how many of them a set takes
    pairs, shared, of:    neighbouring rows of one replay; ids both select; ids the later one selects
    """

    rows: int = 0
    selecting: int = 0
    tied: int = 0
    zero_tied: int = 0
    members: int = 0
    needed: int = 0
    pairs: int = 0
    shared: int = 0
    of: int = 0

    def add(self, picked: NDArray[np.int32], ranked: NDArray[np.floating]) -> None:
        """One row: its selected ids and its visible scores. A row with a score that is no number is only counted."""
        self.rows += 1
        n, m = len(ranked), len(picked)
        if not 0 < m < n or np.isnan(ranked).any() or picked.min() < 0 or picked.max() >= n:
            return
        self.selecting += 1
        cut = ranked[picked].min()
        above, equal = int(np.count_nonzero(ranked > cut)), int(np.count_nonzero(ranked == cut))
        if above + equal > m:
            self.tied += 1
            self.zero_tied += bool(cut == 0)
            self.members += equal
            self.needed += m - above

    def join(self, other: "Density") -> None:
        """Add another's counts."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def neighbours(self, earlier: NDArray[np.int32], later: NDArray[np.int32]) -> None:
        """Two neighbouring rows' ids."""
        self.pairs += 1
        self.of += len(later)
        self.shared += len(np.intersect1d(earlier, later))

    def plain(self) -> dict[str, int]:
        return asdict(self)


def total(parts: list[dict[str, int]]) -> dict[str, int]:
    """The counts of all ranks together."""
    return {name: sum(part[name] for part in parts) for name in Density().plain()}
