"""Meters: what a process really maps and allocates, by counters that do not know the plan.

Mapped bytes come from ``/proc/self/smaps`` (proportional set size: pages mapped twice count once), numpy's from ``tracemalloc``
in numpy's own domain, the C heap's from ``mallinfo2``, torch's from its profiler's memory events. Linux; the C heap only with
glibc.
"""

import ctypes
import gc
import platform
import re
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from palimpsest.run.arena import NAME, Arena

#: tracemalloc's domain of numpy's data
NUMPY_DOMAIN = 389047

#: bytes of the widest torch element: a Python number handed to an operation becomes one for a moment, so smaller pieces are not
#: counted
SCALAR_BYTES = torch.complex128.itemsize

_HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) [0-9a-f]+ \S+ (\d+)\s*(.*)$")


@dataclass(frozen=True)
class Mapped:
    """One mapping of a memfd: address range, access, and the bytes of it that are in memory (``pss``: this mapping's share)."""

    name: str
    inode: int
    start: int
    stop: int
    access: str
    pss: int
    rss: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def mappings(inodes: Iterable[int] | None = None, *, smaps: str = "/proc/self/smaps") -> list[Mapped]:
    """The process's mappings of ``palimpsest-*`` memfds, by address; ``inodes`` limits them to some files (an arena's own)."""
    wanted = set(inodes) if inodes is not None else None
    found: list[Mapped] = []
    header: re.Match[str] | None = None
    sizes: dict[str, int] = {}

    def flush() -> None:
        if header and f"memfd:{NAME}" in header[5] and (wanted is None or int(header[4]) in wanted):
            name = header[5].removesuffix(" (deleted)").split("memfd:")[1]
            start, stop = int(header[1], 16), int(header[2], 16)
            found.append(Mapped(name, int(header[4]), start, stop, header[3], sizes.get("Pss", 0), sizes.get("Rss", 0)))

    for line in Path(smaps).read_text().splitlines():
        match = _HEADER.match(line)
        if match:
            flush()
            header, sizes = match, {}
        elif line.startswith(("Pss:", "Rss:")):
            label, value, _ = line.split()
            sizes[label[:-1]] = int(value) * 1024
    flush()
    return found


def arena_mappings(arena: Arena) -> list[Mapped]:
    """The mappings of this arena's segments alone; ranks in one process do not see each other's."""
    return mappings([s.inode for s in arena.segments.values()])


def arena_pss(arena: Arena) -> dict[str, int]:
    """Segment kind -> proportional set size in bytes, all its mappings together."""
    found = dict.fromkeys(arena.segments, 0)
    for mapped in arena_mappings(arena):
        found[mapped.name.removeprefix(NAME)] += mapped.pss
    return found


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


@cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo2
    return libc.mallinfo2


def heap_bytes() -> tuple[int, int] | None:
    """(bytes in large mappings, bytes in use in the heap) of glibc's malloc, or None elsewhere."""
    call = _mallinfo2()
    if call is None:
        return None
    info = call()
    return int(info.hblkhd), int(info.uordblks)


@dataclass(frozen=True)
class Counters:
    """One reading. ``None``: this machine has no such counter, or it was not asked for.

    mapped:     the memfd mappings, by address
    pss:        sum of their proportional set sizes, bytes
    heap_large: bytes glibc's malloc holds in mappings of their own
    heap_used:  bytes in use in glibc's heap; Python's own objects move it, so it is reported and not gated
    numpy_live: bytes of numpy data alive (tracemalloc's numpy domain)
    """

    mapped: tuple[Mapped, ...]
    pss: int
    heap_large: int | None
    heap_used: int | None
    numpy_live: int | None = None


def counters(arena: Arena | None = None) -> Counters:
    """Read all counters now; ``arena`` limits the mappings to its own. ``numpy_live`` only while tracemalloc is tracing.

    Garbage is collected first, so that a counter moves for what is alive and not for what waits to be freed.
    """
    gc.collect()
    mapped = tuple(arena_mappings(arena) if arena else mappings())
    large, used = heap_bytes() or (None, None)
    return Counters(mapped, sum(m.pss for m in mapped), large, used, _numpy_live())


def _numpy_live() -> int | None:
    if not tracemalloc.is_tracing():
        return None
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, NUMPY_DOMAIN)])
    return sum(trace.size for trace in traces.traces)


def changes(before: Counters, after: Counters) -> list[str]:
    """What moved between two readings of a sealed session, one line each; empty when nothing was allocated, freed or mapped."""
    found = []
    old, new = set(_shape(before)), set(_shape(after))
    found += [f"mapping {name} of {nbytes} bytes, {access}, is gone" for name, _, nbytes, access in sorted(old - new)]
    found += [f"mapping {name} of {nbytes} bytes, {access}, is new" for name, _, nbytes, access in sorted(new - old)]
    for name in ("pss", "heap_large", "numpy_live"):
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            found.append(f"{name} was {was} bytes and is {now}")
    return found


def _shape(reading: Counters) -> list[tuple[str, int, int, str]]:
    return [(m.name, m.start, m.nbytes, m.access) for m in reading.mapped]


@dataclass
class Reading:
    """Counters around a piece of work; ``after`` and the peaks are there when the block is left.

    traced_peak: most bytes of Python objects and numpy data alive at once above the start (tracemalloc keeps one peak for both)
    torch_total: bytes torch's CPU allocator handed out, scalars aside; torch_peak: most alive at once above the start;
    torch_largest: the largest piece
    """

    before: Counters
    after: Counters | None = None
    traced_peak: int | None = None
    torch_total: int | None = None
    torch_peak: int | None = None
    torch_largest: int | None = None

    def changes(self) -> list[str]:
        """``changes`` between the two readings."""
        assert self.after is not None, "the meter is still running"
        return changes(self.before, self.after)


@contextmanager
def meter(arena: Arena | None = None, *, traced: bool = False, torch_memory: bool = False) -> Iterator[Reading]:
    """Read counters before and after the block.

    arena:        only its mappings (else every ``palimpsest-*`` mapping of the process)
    traced:       trace Python's and numpy's allocations (slows Python down; whole process)
    torch_memory: profile torch's CPU allocator (one meter at a time in a process)
    """
    started = traced and not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    try:
        with _torch_peak(torch_memory) as fill:
            reading = Reading(counters(arena))
            if traced:
                tracemalloc.reset_peak()
                start = tracemalloc.get_traced_memory()[0]
            yield reading
            if traced:
                reading.traced_peak = tracemalloc.get_traced_memory()[1] - start
            reading.after = counters(arena)
        fill(reading)
    finally:
        if started:
            tracemalloc.stop()


@contextmanager
def _torch_peak(wanted: bool) -> Iterator[Callable[[Reading], None]]:
    """Profile the block; what is yielded copies the result into a Reading once the block was left."""
    if not wanted:
        yield lambda reading: None
        return

    def fill(reading: Reading) -> None:
        alive = peak = total = largest = 0
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            size = event.nbytes()
            if abs(size) <= SCALAR_BYTES:
                continue
            alive += size
            peak, total, largest = max(peak, alive), total + max(0, size), max(largest, size)
        reading.torch_peak, reading.torch_total, reading.torch_largest = peak, total, largest

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield fill
