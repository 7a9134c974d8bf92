"""Which reusable bytes a replay may change, by the program's declarations, and whether any other byte did (gates S6, V2).

Written for the qualifier and not shared with the runtime's own guards. The complement of the declared write set is sealed by a
CRC-32 per block right after the poison was laid, and compared at two checkpoints: before the latent gather (so that nothing may
lie past the index history yet) and at the end.
"""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palimpsest.core.spec import Plane, Program, Step
from palimpsest.plan.plan import Plan

#: bytes of one sealed block
_BLOCK = 1 << 18
#: buffers whose every prepared row is written whatever the active count: padding is part of their contract
_PADDED = ("ids", "counts")

Span = tuple[int, int]


@dataclass(frozen=True)
class Active:
    """Active sizes of one replay on one rank: tokens visible, rows of the chunk, rows of this rank's slice."""

    visible: int
    rows: int
    own: int


def _reach(buffer: str, plane: Plane, active: Active) -> int:
    """Entries of the plane's first axis that may be written."""
    if buffer in _PADDED:
        return plane.shape[0]
    return {"tokens": active.visible, "rows": active.rows, "slice": active.own}.get(plane.axes[0], plane.shape[0])


def written_by(program: Program, plan: Plan, step: Step, active: Active) -> list[Span]:
    """Byte ranges of the reusable segment that one step may change."""
    found = []
    for access, name in step.accesses():
        place = plan.by_name[name]
        if access == "read" or place.kind != "reusable":
            continue
        at = place.offset
        for plane in program.by_name[name].planes:
            each = plane.nbytes // plane.shape[0]
            found.append((at, at + each * min(plane.shape[0], _reach(name, plane, active))))
            at += plane.nbytes
    return [span for span in found if span[0] < span[1]]


def merge(spans: list[Span]) -> list[Span]:
    """The union of byte ranges, ascending and disjoint."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def outside(spans: list[Span], size: int) -> list[Span]:
    """The bytes of [0, size) that no span covers."""
    found, at = [], 0
    for start, stop in [*merge(spans), (size, size)]:
        if at < start:
            found.append((at, start))
        at = max(at, stop)
    return found


def common(first: list[Span], second: list[Span]) -> list[Span]:
    """Bytes in both of two ascending disjoint lists."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            found.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


class WriteSet:
    """The complement of one replay's write set over the reusable segment, sealed after the poison.

    until: name of the step before which the first checkpoint lies
    """

    def __init__(self, program: Program, plan: Plan, *, until: str, active: Active, memory: NDArray[np.uint8]):
        self._memory = memory
        early: list[Span] = []
        late: list[Span] = []
        target = early
        for step in program.steps:
            if step.name == until:
                target = late
            target += written_by(program, plan, step, active)
        before, after = outside(early, len(memory)), outside(early + late, len(memory))
        self.written = len(memory) - sum(stop - start for start, stop in after)
        self._kept = self._seal(after)
        self._early = self._seal(common(before, outside(after, len(memory))))
        self.kept_bytes = sum(stop - start for start, stop in self._kept)
        self.early_bytes = self.kept_bytes + sum(stop - start for start, stop in self._early)

    def _seal(self, spans: list[Span]) -> dict[Span, int]:
        blocks = [(at, min(at + _BLOCK, stop)) for start, stop in spans for at in range(start, stop, _BLOCK)]
        return {span: zlib.crc32(self._memory[span[0] : span[1]].data) for span in blocks}

    def _damage(self, sealed: dict[Span, int]) -> Span | None:
        return next((span for span, seal in sealed.items() if zlib.crc32(self._memory[span[0] : span[1]].data) != seal), None)

    def damage_before_latent(self) -> Span | None:
        """The first block, outside what the steps so far may write, that changed."""
        return self._damage(self._kept) or self._damage(self._early)

    def damage_at_end(self) -> Span | None:
        """The first block outside the whole write set that changed."""
        return self._damage(self._kept)
