"""Gates A4, A5, A6: prepared bytes follow the plan at any size, cannot grow, and do not grow.

A5 plans the layer at three context lengths and maps them without touching a page, so that a million tokens cost address space only.
A6 replays small mixed chunks; A4 runs those replays with the address space capped at what the process holds, and shows that the cap bites.
"""

import mmap
import resource
from collections.abc import Callable
from pathlib import Path

from palimpsest.core.spec import Program
from palimpsest.core.units import align_up
from palimpsest.plan.plan import Plan
from palimpsest.prove.gates import Sheet
from palimpsest.run.arena import PAGE, Arena
from palimpsest.run.meters import Counters, changes, counters

#: context lengths of A5: two whose histories are no multiples of 2 MiB, and the largest
LENGTHS = (4096, 65_536, 1 << 20)
#: A6: replays, and the windows they are counted in
SOAK_REPLAYS, SOAK_WINDOWS = 100, 4
#: units of A4: the capped replays ran; a late mapping failed; the cap is gone afterwards
CAP_UNITS = 3
#: what Python's own small objects may still map under the cap: arenas of its allocator
_HEADROOM = 4 << 20


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
        cell.check(mapped[segment.kind] == pages, 1, f"{t} tokens: {segment.kind} maps {mapped[segment.kind]} bytes, {pages} wanted", pages)
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
    """While it is open this process's address space cannot grow beyond what it has now and Python's own headroom."""

    def __enter__(self) -> "Cap":
        self._old = resource.getrlimit(resource.RLIMIT_AS)
        hard = self._old[1]
        wanted = address_space() + _HEADROOM
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
        return self

    def __exit__(self, *exception: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._old)


def late_mapping(nbytes: int) -> bool:
    """Whether ``nbytes`` more can be mapped."""
    try:
        mmap.mmap(-1, nbytes).close()
    except (OSError, MemoryError):
        return False
    return True


def late_arena(arena: Arena) -> bool:
    """Whether the arena's backend still hands out a segment: another view of the largest one."""
    largest = max(arena.segments, key=lambda kind: arena.segments[kind].mapped)
    return late_mapping(max(arena.segments[largest].mapped, 2 * _HEADROOM))


def soak(sheet: Sheet, arena: Arena, replay: Callable[[int], None], meet: Callable[[str], None]) -> None:
    """A4 and A6: the replays under the cap, in windows; ``replay(n)`` runs the n-th, ``meet`` joins all ranks.

    A window must leave the mappings, their proportional size and the large heap mappings as they were. Heap bytes in use move with
    Python's own objects: growth in every single window is a leak.
    """
    cell, each = sheet.cell("A6"), SOAK_REPLAYS // SOAK_WINDOWS
    capped = sheet.cell("A4")
    for number in range(each):  # what the first small chunks leave in Python's own caches is not a leak
        replay(number)
    meet("soak warm")
    readings: list[Counters] = []
    with Cap():
        meet("soak capped")
        readings.append(counters(arena))
        for window in range(SOAK_WINDOWS):
            for number in range(each):
                replay(window * each + number)
            meet(f"soak window {window}")
            readings.append(counters(arena))
            moved = changes(readings[-2], readings[-1])
            cell.check(not moved, each, f"replays {window * each}..{(window + 1) * each - 1}: {moved[0] if moved else ''}")
        capped.passed(1)
        capped.check(not late_arena(arena), 1, "a mapping of the largest segment's size succeeded under the cap")
        meet("soak done")
    capped.check(late_mapping(2 * _HEADROOM), 1, "nothing can be mapped after the cap was lifted")
    grown = leak([r.heap_used for r in readings])
    cell.check(not grown, 1, f"heap bytes in use grew in each of {SOAK_WINDOWS} windows of {each} replays: {[r.heap_used for r in readings]}")


def leak(used: list[int | None]) -> bool:
    """Whether every window ended with more heap bytes in use than it began with."""
    known = [value for value in used if value is not None]
    return len(known) == len(used) > 1 and all(after > before for before, after in zip(known, known[1:], strict=False))
