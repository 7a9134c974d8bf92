"""The optional placer: omnimalloc (``pip install palimpsest[placers]``), behind the one adapter that knows it.

``omni`` first, then ``tabu_search`` without a timeout; both deterministic, both honour pins. Alignment is validated there and not
enforced, so sizes and offsets are in units of the largest alignment. What comes back is believed only after ``Problem.holds``.
"""

import importlib
import importlib.metadata
import importlib.util
import itertools
from typing import Any

from palimpsest.core.units import align_up
from palimpsest.plan.fold import Problem
from palimpsest.plan.lifetime import Lifetimes
from palimpsest.plan.search import Placement, first_fit

#: nodes up to which ``tabu_search`` is asked; it looks at every node ten thousand times
TABU_NODES = 400


def version() -> str:
    """The installed version when it is one this adapter knows (1.x), else an empty text."""
    if importlib.util.find_spec("omnimalloc") is None:
        return ""
    found = importlib.metadata.version("omnimalloc")
    return found if found.split(".")[0] == "1" else ""


def improve(lifetimes: Lifetimes, problem: Problem, best: Placement) -> Placement:
    """``best``, or a placement with a lower peak when omnimalloc is installed and finds one."""
    found = version()
    if not found or best.peak <= problem.bound:
        return best
    allocators: Any = importlib.import_module("omnimalloc.allocators")
    chosen = {"omni": allocators.OmniAllocator()}
    if len(problem.sizes) <= TABU_NODES:
        chosen["tabu_search"] = allocators.TabuSearchAllocator(timeout=None)
    unit = max(problem.aligns)
    wanted = _allocations(lifetimes, problem, unit)
    if not wanted:
        return best
    for name, allocator in chosen.items():
        placed = {a.id: a.offset * unit for a in allocator.allocate(wanted)}
        offsets = tuple(placed[k] for k in range(len(problem.sizes)))
        if problem.peak(offsets) < best.peak and problem.holds(offsets):
            best = Placement(offsets, problem.peak(offsets), f"omnimalloc-{found}/{name}")
        if best.peak <= problem.bound:
            break
    return best


def _allocations(lifetimes: Lifetimes, problem: Problem, unit: int) -> tuple[Any, ...]:
    """One allocation per node; what our search places first is pinned where it lies in every one of our placements.

    Empty when pinned nodes share bytes in a gap of one of them (there a lifetime is one interval) or lie inside a unit.
    """
    kind: Any = importlib.import_module("omnimalloc").Allocation
    pinned = first_fit(problem, [k for k in range(len(problem.sizes)) if k not in problem.fixed]).offsets
    spans: list[tuple[Any, Any]] = [*(_spans if lifetimes.order.one_queue else _clocks)(lifetimes, problem)]
    for a, b in itertools.permutations(sorted(problem.fixed), 2):
        meet = pinned[a] < pinned[b] + align_up(problem.sizes[b], unit) and pinned[b] < pinned[a] + align_up(
            problem.sizes[a], unit
        )
        if pinned[a] % unit or (meet and not (_over(spans[a], spans[b]) or _over(spans[b], spans[a]))):
            return ()
    return tuple(
        kind(k, align_up(size, unit) // unit, *spans[k], offset=pinned[k] // unit if k in problem.fixed else None)
        for k, size in enumerate(problem.sizes)
    )


def _over(one: tuple[Any, Any], two: tuple[Any, Any]) -> bool:
    """Whether the first lifetime is over when the second begins."""
    stop, start = one[1], two[0]
    return stop <= start if isinstance(stop, int) else all(a <= b for a, b in zip(stop, start, strict=True))


def _spans(lifetimes: Lifetimes, problem: Problem) -> list[tuple[int, int]]:
    """First and last of the different live sets each node belongs to: exact without folding, else at worst too long."""
    node = {name: k for k, names in enumerate(problem.members) for name in names}
    sets = list(dict.fromkeys(frozenset(node[name] for name in names) for names in dict.fromkeys(lifetimes.live)))
    spans: dict[int, tuple[int, int]] = {}
    for i, alive in enumerate(sets):
        for k in alive:
            spans[k] = (spans.get(k, (i, i))[0], i + 1)
    return [spans[k] for k in range(len(problem.sizes))]


def _clocks(lifetimes: Lifetimes, problem: Problem) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Vector clocks: what is finished before a node's first write, and what must be finished once it is over."""
    order, found = lifetimes.order, []
    for names in problem.members:
        lives = [life for name in names for life in lifetimes.ranges[name]]
        start = tuple(max(0, n) for n in map(min, zip(*(order.finished(life.first) for life in lives), strict=True)))
        stop = tuple(map(max, zip(start, *(order.reach(life.accesses) for life in lives), strict=True)))
        found.append((start, stop if stop != start else tuple(n + 1 for n in start)))
    return found
