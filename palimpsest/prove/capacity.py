"""Gates A4, A5, A6: prepared bytes follow the plan at any size, cannot grow, and do not grow.

A5 plans the layer at three context lengths and maps them without touching a page, so that a million tokens cost address space
only. A6 replays small mixed chunks; A4 runs those replays with the address space capped at what the process holds, and shows
that the cap bites.
"""

import mmap
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palimpsest.core.spec import Program
from palimpsest.core.units import align_up
from palimpsest.plan.plan import Plan
from palimpsest.prove.gates import Cell, Sheet
from palimpsest.run.arena import PAGE, Arena
from palimpsest.run.meters import changes, counters

#: context lengths of A5: two whose histories are no multiples of 2 MiB, and the largest
LENGTHS = (4096, 65_536, 1 << 20)
#: A6: replays, and the windows they are counted in
SOAK_REPLAYS, SOAK_WINDOWS = 100, 4
#: A6 promises to see a leak of 1 KiB a replay; half of it leaves room for what Python gives back meanwhile
LEAK_BYTES = 512
#: units of A4: the capped replays ran; a late mapping failed; the cap is gone afterwards
CAP_UNITS = 3
#: what Python's own small objects may still map under the cap: arenas of its allocator
HEADROOM = 4 << 20


def lengths(topk: int) -> tuple[int, ...]:
    """The lengths at which a model with this top-k can be planned."""
    return tuple(t for t in LENGTHS if t >= 4 * topk)


def law_units(segments: int) -> int:
    """A5 at one length: the saving, both histories, the caches, and each segment's mapping."""
    return 3 + segments


def law(sheet: Sheet, program: Program, plans: dict[str, Plan], *, records: tuple[int, int]) -> dict[str, int]:
    """A5 at one length. records: bytes of one index and of one latent record. Returns segment -> mapped bytes."""
    cell, limits = sheet.cell("A5"), program.limits
    index, latent = records
    t = limits.tokens
    saved = plans["base"].total - plans["alias"].total
    cell.check(saved == index * t, 1, f"{t} tokens: base minus alias is {saved} bytes, {index} x {t} = {index * t} wanted")
    sizes = [plans["alias"].by_name[name].nbytes for name in program.histories]
    cell.check(sizes == [index * t, latent * t], 1, f"{t} tokens: histories of {sizes} bytes, {[index * t, latent * t]} wanted")
    held = sum(b.nbytes for b in program.buffers if b.kind == "persistent")
    wanted = limits.rank_pages * limits.page * (index + latent)
    cell.check(held == wanted, 1, f"{t} tokens: caches of {held} bytes on a rank, {wanted} wanted")
    mapped = {}
    for segment in plans["alias"].segments:
        mapped[segment.kind] = _mapped(segment.nbytes)
        pages = align_up(segment.nbytes, PAGE)
        cell.check(
            mapped[segment.kind] == pages,
            1,
            f"{t} tokens: {segment.kind} maps {mapped[segment.kind]} bytes, {pages} wanted",
            pages,
        )
    return mapped


def _mapped(nbytes: int) -> int:
    """How many bytes the kernel says a mapping of ``nbytes`` has; no page of it is touched."""
    if not nbytes:
        return 0
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)):
        return address_space() - _without(nbytes)


def _without(nbytes: int) -> int:
    """The address space as it would be without the mapping: measured by making a second one and taking the difference."""
    before = address_space()
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)):
        return 2 * before - address_space()


def address_space() -> int:
    """Bytes of virtual memory this process has mapped, as the limit counts them."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


class Cap:
    """While it is entered this process's address space cannot grow by more than ``headroom``. The limit to restore is read when
    it is made."""

    def __init__(self, headroom: int):
        self.headroom = headroom
        self._old = resource.getrlimit(resource.RLIMIT_AS)

    def __enter__(self) -> "Cap":
        self.tighten()
        return self

    def tighten(self) -> None:
        """Lower the cap to what the process holds now: memory it gave back since may not be taken again."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limits = [address_space() + self.headroom, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))

    def __exit__(self, *exception: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._old)


def late_mapping(nbytes: int) -> bool:
    """Whether ``nbytes`` more can be mapped."""
    try:
        mmap.mmap(-1, nbytes).close()
    except (OSError, MemoryError):
        return False
    return True


def largest(arena: Arena) -> int:
    """Mapped bytes of the largest segment."""
    return max(segment.mapped for segment in arena.segments.values())


@dataclass(frozen=True)
class Soak:
    """The parts of a soak: ``replay(n)`` runs the n-th chunk of ``kinds`` in turn, ``meet`` joins all ranks.

    alone:      heap counters are this rank's own
    allocating: foreign kernels may take memory of their own; the cap then leaves room for as much as the largest segment
    """

    arena: Arena
    replay: Callable[[int], None]
    meet: Callable[[str], None]
    kinds: int
    alone: bool
    allocating: bool

    def run(self, sheet: Sheet) -> None:
        """A4 and A6: the replays under the cap, in windows.

        A window must leave the mappings, their proportional size and the large heap mappings as they were. Heap bytes in use
        move with Python's own objects: growth of LEAK_BYTES a replay in every single window is a leak.
        """
        each, capped, cell = SOAK_REPLAYS // SOAK_WINDOWS, sheet.cell("A4"), sheet.cell("A6")
        for number in range(self.kinds):  # what the first small chunks leave in Python's own caches is not a leak
            self.replay(number)
        headroom = largest(self.arena) if self.allocating else HEADROOM
        cap = Cap(headroom)
        self.meet("soak warm")
        with cap:
            self.meet("soak capped")
            used = [self._window(cell, window, each) for window in range(SOAK_WINDOWS)]
            capped.passed(1)
            cap.tighten()
            late = max(largest(self.arena), 2 * headroom)
            capped.check(not late_mapping(late), 1, f"a mapping of {late} bytes succeeded under the cap")
            self.meet("soak done")
        self.meet("soak uncapped")
        capped.check(late_mapping(2 * headroom), 1, "nothing can be mapped after the cap was lifted")
        grown = self.alone and leak(used, each)
        cell.check(
            not grown,
            1,
            f"heap bytes in use grew by {LEAK_BYTES} a replay in each of {SOAK_WINDOWS} windows of {each}, at last by {used[-1]}",
        )

    def _window(self, cell: Cell, window: int, each: int) -> int | None:
        """Heap bytes in use that the window added."""
        before = counters(self.arena)
        for number in range(window * each, (window + 1) * each):
            self.replay(number)
        self.meet(f"soak window {window}")
        after = counters(self.arena)
        moved = changes(before, after) if self.alone else []
        cell.check(not moved, each, f"replays {window * each}..{(window + 1) * each - 1}: {moved[0] if moved else ''}")
        return None if before.heap_used is None or after.heap_used is None else after.heap_used - before.heap_used


def leak(grown: list[int | None], replays: int) -> bool:
    """Whether every window of ``replays`` added at least LEAK_BYTES of heap bytes in use for each of them."""
    return bool(grown) and all(value is not None and value >= LEAK_BYTES * replays for value in grown)
