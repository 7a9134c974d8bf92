"""Fill this rank's share of the persistent caches with a case's seeded history, and plant what the case declares as planted.

Only what is not there already is written: the same latents serve every case, and cases of one data name share their index
records.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from palimpsest.prove.cases import Case, Replay
from palimpsest.prove.data import Data
from palimpsest.prove.writeset import Span, common, merge, outside
from palimpsest.run.arena import Arena

#: tokens generated at once; a multiple of any page
_BATCH = 8192


@dataclass
class Filled:
    """Which tokens of a cache hold the records of ``name``."""

    name: str = ""
    spans: list[Span] = field(default_factory=list)

    def missing(self, name: str, tokens: int) -> list[Span]:
        """Token ranges below ``tokens`` that have to be written."""
        if name != self.name:
            self.name, self.spans = name, []
        return common(outside(self.spans, tokens), [(0, tokens)]) if tokens else []

    def add(self, span: Span) -> None:
        self.spans = merge([*self.spans, span])

    def drop(self, start: int, stop: int, tokens: int) -> None:
        """Tokens [start, stop) were overwritten; ``tokens`` is the prepared number."""
        self.spans = common(self.spans, outside([(start, stop)], tokens))


class Caches:
    """The persistent caches of one rank, as seeded."""

    def __init__(self, arena: Arena, rank: int):
        self.arena, self.rank = arena, rank
        self.limits = arena.program.limits
        self._index, self._latent = Filled(), Filled()

    def fill(self, data: Data, history: int) -> None:
        """Make tokens [0, history) that this rank owns hold the case's records."""
        for start, stop in self._index.missing(f"{data.case.records}/{data.case.data}", history):
            self._each(start, stop, lambda a, b: put_index(self.arena, self.rank, data, a, b))
            self._index.add((start, stop))
        for start, stop in self._latent.missing("latent", history):
            self._each(
                start, stop, lambda a, b: put_records(self.arena, "latent_cache", self.rank, a, [data.latent_records(a, b)])
            )
            self._latent.add((start, stop))

    def _each(self, start: int, stop: int, write: "object") -> None:
        assert callable(write)
        while start < stop:
            end = min(stop, (start // _BATCH + 1) * _BATCH)
            write(start, end)
            start = end

    def appended(self, step: Replay) -> None:
        """A replay overwrote the records of its own tokens."""
        for filled in (self._index, self._latent):
            filled.drop(step.history, step.visible, self.limits.tokens)


def put_index(arena: Arena, rank: int, data: Data, start: int, stop: int) -> None:
    """Write the index records of tokens [start, stop) that ``rank`` owns."""
    values, scales = data.index_records(start, stop)
    planes = [values] if scales is None else [values, scales.astype("<f4").view(np.uint8).reshape(-1, 4)]
    put_records(arena, "index_cache", rank, start, planes)


def put_records(arena: Arena, cache: str, rank: int, start: int, planes: list[NDArray[np.uint8]]) -> None:
    """Write records of tokens start, start + 1, ... into the pages of ``rank``; a page holds its planes one after the other."""
    limits = arena.program.limits
    page, stop = limits.page, start + len(planes[0])
    pages = arena.view(cache).numpy()
    first = start // page
    for number in range(first + (rank - first) % limits.ranks, -(-stop // page), limits.ranks):
        low, high = max(start, number * page), min(stop, (number + 1) * page)
        row, at = pages[number // limits.ranks], 0
        for plane in planes:
            width = plane.shape[1]
            begin = at + (low - number * page) * width
            row[begin : begin + (high - low) * width] = plane[low - start : high - start].reshape(-1)
            at += page * width


def plant(step_name: str, arena: Arena, *, case: Case, step: Replay, data: Data, rank: int, rows: range) -> None:
    """After a step of the replay: overwrite what the case declares as planted.

    Lattice rows get their queries and head weights; with lattice queries the appended index records are lattice records too.
    Natural rows keep what the layer computed.
    """
    if step.regime not in ("lattice", "mixed"):
        return
    if step_name == "append_index" and case.records == "lattice":
        put_index(arena, rank, data, step.history, step.visible)
    if step_name == "index_query" and len(rows):
        query, weights = data.queries(step, rows.start, rows.stop)
        stored = arena.view("index_query").view(torch.uint8).numpy()
        held = arena.view("head_weights").numpy()
        for slot, row in enumerate(rows):
            if data.lattice_row(step, row):
                stored[slot] = query[slot].reshape(stored[slot].shape)
                held[slot] = weights[slot]
