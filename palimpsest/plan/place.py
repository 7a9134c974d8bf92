"""Where buffers lie: greedy by size at the lowest free offset, then a fixed number of seeded restarts of the order.

Deterministic: the same program gives the same plan on every machine and rank; nothing stops by the clock, only at the
lower bound. A declared pair of histories is placed before everything else, the late one at offset 0; whether the early
one may lie on its first bytes is decided by the order of the steps like for any other pair.
"""

import random

from palimpsest.core.errors import BadConfig
from palimpsest.core.spec import KINDS, Buffer, Program
from palimpsest.core.units import align_up
from palimpsest.plan.lifetime import START, Lifetimes
from palimpsest.plan.plan import Overlap, Place, Plan, Segment

#: id of the algorithm; a change that moves any offset gets a new number
PLACER = "restart-greedy-1"
RESTARTS = 200


def place(program: Program, reuse: str = "on", restarts: int = RESTARTS) -> Plan:
    """The plan of ``program``: every buffer at an offset of the segment of its kind.

    ``reuse="off"`` is the same plan with the early history moved behind all other reusable bytes and every other offset
    unchanged, so the two plans differ by exactly that history's bytes; without histories the offsets are the same either way.
    Raises PlanRefused for a program without safe lifetimes and BadConfig for a buffer without bytes.
    """
    if reuse not in ("on", "off"):
        raise BadConfig(f"reuse is {reuse!r}; it is 'on' or 'off'")
    for buffer in program.all_buffers:
        if buffer.nbytes < 1 or buffer.align < 1:
            raise BadConfig(f"buffer {buffer.name} has {buffer.nbytes} bytes and alignment {buffer.align}; both must be positive")
    lifetimes = Lifetimes(program)
    offsets = _Search(lifetimes).run(restarts)
    if reuse == "off" and program.histories:
        early = program.by_name[program.histories[0]]
        end = max(offsets[name] + program.by_name[name].nbytes for name in offsets)
        offsets[early.name] = align_up(align_up(end, lifetimes.granule), early.align)
    return assemble(lifetimes, offsets, reuse, PLACER)


def assemble(lifetimes: Lifetimes, reusable: dict[str, int], reuse: str, placer: str) -> Plan:
    """The plan that puts each reusable buffer at its given offset and stacks all others; proves nothing: ``check`` does."""
    program = lifetimes.program
    offsets, sizes = _stack(program)
    if reusable:
        end = max(reusable[name] + program.by_name[name].nbytes for name in reusable)
        sizes["reusable"] = end if reuse == "off" and program.histories else align_up(end, lifetimes.granule)
    offsets |= reusable
    return Plan(
        program=program.name,
        program_digest=program.digest,
        limits=program.limits,
        reuse=reuse,
        placer=placer,
        segments=tuple(Segment(kind, sizes[kind]) for kind in KINDS if kind in sizes),
        places=tuple(_place(buffer, offsets[buffer.name], lifetimes) for buffer in program.all_buffers),
        overlaps=_overlaps(reusable, lifetimes),
        lower_bound=lifetimes.lower_bound,
    )


def _stack(program: Program) -> tuple[dict[str, int], dict[str, int]]:
    """Offsets of the buffers that share nothing, one after another, and the size of each kind's segment."""
    offsets: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for buffer in program.all_buffers:
        if buffer.kind != "reusable":
            offsets[buffer.name] = align_up(sizes.get(buffer.kind, 0), buffer.align)
            sizes[buffer.kind] = offsets[buffer.name] + buffer.nbytes
    return offsets, sizes


def _place(buffer: Buffer, offset: int, lifetimes: Lifetimes) -> Place:
    first, last = "start", "end"
    if buffer.kind == "reusable":
        lives = lifetimes.ranges[buffer.name]
        first, last = lifetimes.step_name(lives[0].first), lifetimes.step_name(lives[-1].last)
    return Place(buffer.name, buffer.kind, offset, buffer.nbytes, buffer.align, first, last)


def _overlaps(offsets: dict[str, int], lifetimes: Lifetimes) -> tuple[Overlap, ...]:
    """Every pair of reusable buffers that share bytes, in the order they begin to live."""
    size = {name: lifetimes.program.by_name[name].nbytes for name in lifetimes.names}
    begin = {name: lifetimes.ranges[name][0].first for name in lifetimes.names}
    names = sorted(lifetimes.names, key=lambda name: (begin[name], name))
    found = []
    for i, early in enumerate(names):
        for late in names[i + 1 :]:
            start = max(offsets[early], offsets[late])
            stop = min(offsets[early] + size[early], offsets[late] + size[late])
            if start < stop:
                before = [a for life in lifetimes.ranges[early] for a in life.accesses if a < begin[late]]
                order = f"{lifetimes.step_name(max(before, default=START))} before {lifetimes.step_name(begin[late])}"
                found.append(Overlap(early, late, start, stop, order))
    return tuple(found)


class _Search:
    """First fit over orders of the reusable buffers; keeps the lowest peak, the earliest one among equals."""

    def __init__(self, lifetimes: Lifetimes):
        self.names = lifetimes.names
        self.bound = lifetimes.lower_bound if self.names else 0
        buffers = [lifetimes.program.by_name[name] for name in self.names]
        self.size = [b.nbytes for b in buffers]
        self.align = [b.align for b in buffers]
        self.granule = lifetimes.granule
        self.conflicts = [
            frozenset(j for j, b in enumerate(self.names) if i != j and not lifetimes.may_share(a, b))
            for i, a in enumerate(self.names)
        ]
        self.pinned = [self.names.index(name) for name in reversed(lifetimes.program.histories) if name in self.names]

    def run(self, restarts: int) -> dict[str, int]:
        """Buffer name -> offset."""
        rest = [i for i in range(len(self.names)) if i not in self.pinned]
        best_order = sorted(rest, key=lambda i: (-self.size[i], i))
        best, peak = self._fit(best_order)
        draw = random.Random(0)
        for turn in range(restarts):
            if peak <= self.bound or len(rest) < 2:
                break
            order = self._shuffle(best_order, rest, draw, turn)
            offsets, found = self._fit(order)
            if found < peak:
                best, peak, best_order = offsets, found, order
        return {name: best[i] for i, name in enumerate(self.names)}

    def _shuffle(self, best: list[int], rest: list[int], draw: random.Random, turn: int) -> list[int]:
        """Odd turns: a few buffers of the best order trade places. Even turns: a fresh order by jittered size."""
        if turn % 2:
            order = list(best)
            for _ in range(1 + draw.randrange(4)):
                a, b = draw.randrange(len(order)), draw.randrange(len(order))
                order[a], order[b] = order[b], order[a]
            return order
        weight = {i: self.size[i] * (100 + draw.randrange(300)) for i in rest}
        return sorted(rest, key=lambda i: (-weight[i], i))

    def _fit(self, order: list[int]) -> tuple[list[int], int]:
        """Lowest offset for each buffer in turn; returns offsets and the peak in whole granules."""
        offsets = [-1] * len(self.names)
        peak = 0
        for i in [*self.pinned, *order]:
            at = 0
            for start, stop in sorted((offsets[j], offsets[j] + self.size[j]) for j in self.conflicts[i] if offsets[j] >= 0):
                if at + self.size[i] <= start:
                    break
                at = max(at, align_up(stop, self.align[i]))
            offsets[i] = at
            peak = max(peak, at + self.size[i])
        return offsets, align_up(peak, self.granule)
