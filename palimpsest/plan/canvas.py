"""Who holds each byte of a segment: disjoint spans in ascending order, found by bisection."""

from bisect import bisect_right
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Canvas(Generic[Owner]):
    """Spans (start, stop, owner), ascending and disjoint. Painting replaces what was there."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.spans: list[tuple[int, int, Owner]] = []

    def under(self, start: int, stop: int) -> list[tuple[int, int, Owner]]:
        """The painted spans inside [start, stop), clipped to it."""
        lo, hi = self._range(start, stop)
        return [(max(a, start), min(b, stop), owner) for a, b, owner in self.spans[lo:hi]]

    def paint(self, start: int, stop: int, owner: Owner) -> None:
        """Give [start, stop) to ``owner``."""
        lo, hi = self._range(start, stop)
        new = [(start, stop, owner)]
        if lo < hi:
            first, last = self.spans[lo], self.spans[hi - 1]
            if first[0] < start:
                new.insert(0, (first[0], start, first[2]))
            if last[1] > stop:
                new.append((stop, last[1], last[2]))
        self.spans[lo:hi] = new
        self.starts[lo:hi] = [span[0] for span in new]

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        lo = bisect_right(self.starts, start) - 1
        if lo < 0 or self.spans[lo][1] <= start:
            lo += 1
        hi = bisect_right(self.starts, stop - 1)
        return lo, max(lo, hi)
