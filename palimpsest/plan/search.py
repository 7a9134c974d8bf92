"""Seeded restart-greedy: first fit over orders of the nodes. Standard library only, always present, never stopped by the clock.

The first order is by size. Later ones are the best order with a few nodes traded, a fresh order by jittered size, or the best
order with what ends at the peak moved forward. The number of passes is fixed by the size of the problem alone, so every machine
finds the same placement.
"""

import random
from dataclasses import dataclass

from palimpsest.core.units import align_up
from palimpsest.plan.fold import Problem

#: id of the algorithm; a change that moves any offset gets a new number
PLACER = "restart-greedy-2"
RESTARTS = 200
#: neighbours looked at over all passes; a larger problem gets fewer passes
WORK = 6_000_000


@dataclass(frozen=True)
class Placement:
    """Offsets of a problem's nodes and the peak in whole granules."""

    offsets: tuple[int, ...]
    peak: int
    placer: str = PLACER


def search(problem: Problem, restarts: int = RESTARTS) -> Placement:
    """The best placement found; the earliest one among equals."""
    rest = [k for k in range(len(problem.sizes)) if k not in problem.fixed]
    order = sorted(rest, key=lambda k: (-problem.sizes[k], k))
    best = first_fit(problem, order)
    if len(rest) < 2:
        return best
    draw = random.Random(0)
    for turn in range(min(restarts, max(4, WORK // problem.work))):
        if best.peak <= problem.bound:
            break
        tried = _another(problem, order, best, draw, turn)
        found = first_fit(problem, tried, below=best.peak)
        if found.peak < best.peak:
            best, order = found, tried
    return best


def _another(problem: Problem, best: list[int], found: Placement, draw: random.Random, turn: int) -> list[int]:
    kind = turn % 3
    if kind == 0:
        order = list(best)
        for _ in range(1 + draw.randrange(4)):
            a, b = draw.randrange(len(order)), draw.randrange(len(order))
            order[a], order[b] = order[b], order[a]
        return order
    if kind == 1:
        weight = {k: problem.sizes[k] * (100 + draw.randrange(300)) for k in best}
        return sorted(best, key=lambda k: (-weight[k], k))
    late = [k for k in best if found.offsets[k] + problem.sizes[k] > problem.bound]
    order = [k for k in best if k not in late]
    for k in late:
        order.insert(draw.randrange(1 + len(order) // 2), k)
    return order


def first_fit(problem: Problem, order: list[int], below: int = 0) -> Placement:
    """The lowest free offset for each node in turn: pins, nodes placed first, then ``order``; gives up at peak ``below``."""
    offsets = [-1] * len(problem.sizes)
    for k, at in problem.pins.items():
        offsets[k] = at
        _put_tied(problem, offsets, k)
    peak = 0
    for k in [*problem.first, *order]:
        if offsets[k] < 0:
            offsets[k] = _lowest(problem, offsets, k)
            _put_tied(problem, offsets, k)
        if offsets[k] + problem.sizes[k] > below > 0:
            return Placement((), below)
    peak = max((at + size for at, size in zip(offsets, problem.sizes, strict=True)), default=0)
    return Placement(tuple(offsets), align_up(peak, problem.granule))


def _put_tied(problem: Problem, offsets: list[int], base: int) -> None:
    for node, by in problem.tied.get(base, ()):
        offsets[node] = offsets[base] + by


def _lowest(problem: Problem, offsets: list[int], k: int) -> int:
    """The lowest offset of ``k`` at which it, and all that is tied to it, is free."""
    group = ((k, 0), *problem.tied.get(k, ()))
    at = 0
    while True:
        free = at
        for node, by in group:
            free = _free(problem, offsets, node, free + by) - by
        free = align_up(free, problem.aligns[k])
        if free == at:
            return at
        at = free


def _free(problem: Problem, offsets: list[int], k: int, at: int) -> int:
    """The lowest offset of ``k`` from ``at`` on between its placed neighbours."""
    size, align, sizes = problem.sizes[k], problem.aligns[k], problem.sizes
    at = align_up(at, align)
    for start, stop in sorted([(offsets[j], offsets[j] + sizes[j]) for j in problem.conflicts[k] if offsets[j] >= 0]):
        if at + size <= start:
            break
        if stop > at:
            at = align_up(stop, align)
    return at
