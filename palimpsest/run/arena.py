"""The memory a plan is run in: one memfd-backed mapping per pool, and views of it that never copy.

Each segment of a plan (weights, persistent, reusable, staging, table, signal) becomes one memfd named ``palimpsest-<kind>``,
rounded up to whole pages and mapped between two red zones that nobody may touch (``PROT_NONE``, which costs no memory). All
views of a segment share one torch storage. A second mapping of the same pages (``second_view``) is what the phase lock
protects. Linux only.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from palimpsest.core.errors import Unavailable, UserError
from palimpsest.core.spec import Plane, Program
from palimpsest.core.units import align_up, format_bytes
from palimpsest.kernels.call import TORCH_DTYPES
from palimpsest.plan.plan import Plan

PAGE = mmap.PAGESIZE
#: bytes of the untouchable red zone on each side of a mapping
RED_ZONE = align_up(64 << 10, PAGE)
#: memfd name before the segment's kind
NAME = "palimpsest-"

_FIXED, _NORESERVE, _POPULATE_WRITE = 0x10, 0x4000, 23
_RESERVE_STEP = 256 << 20
_ACCESS = {"none": 0, "read": mmap.PROT_READ, "write": mmap.PROT_READ | mmap.PROT_WRITE}


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _map(address: int | None, nbytes: int, access: int, flags: int, fd: int) -> int:
    found = _libc().mmap(address, nbytes, access, flags, fd, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        why = os.strerror(code)
        raise Unavailable(f"cannot map {format_bytes(nbytes)}: {why}; prepare less, or raise the address space limit")
    return int(found)


def _unmap(address: int, nbytes: int) -> None:
    _libc().munmap(address, nbytes)


def available_bytes() -> int:
    """Bytes this process may still take: what the kernel calls available, or less when its control group is smaller."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, used, stat = ((group / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
    except OSError:
        return found
    if limit.strip() == "max":
        return found
    cached = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
    return min(found, int(limit) - int(used) + cached)


def _require(nbytes: int, what: str) -> None:
    """Raise Unavailable when ``nbytes`` more cannot be had: tmpfs would take them until the kernel kills somebody."""
    free = available_bytes()
    if nbytes > free:
        raise Unavailable(f"{what}: {format_bytes(nbytes)} wanted, {format_bytes(free)} available; free memory or prepare less")


def _reserve(fd: int, nbytes: int, what: str) -> None:
    """Give the memfd its pages now, so that a full machine is an error here and not a SIGBUS in the middle of a run."""
    _require(nbytes, what)
    for start in range(0, nbytes, _RESERVE_STEP):
        step = min(_RESERVE_STEP, nbytes - start)
        _require(step, what)  # other ranks reserve at the same time
        os.posix_fallocate(fd, start, step)


class Window:
    """One mapping of a whole memfd, between two red zones.

    tensor:  the mapping as u8 [mapped bytes]; every view is a slice of it, so all share its storage
    The pages stay mapped until ``release`` was called and the last tensor over them is gone: a result somebody still holds never
    dangles.
    """

    def __init__(self, fd: int, nbytes: int):
        total = nbytes + 2 * RED_ZONE
        base = _map(None, total, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
        self.address, self.nbytes = base + RED_ZONE, nbytes
        try:
            _map(self.address, nbytes, _ACCESS["write"], mmap.MAP_SHARED | _FIXED, fd)
        except Unavailable:
            _unmap(base, total)
            raise
        memory = (ctypes.c_ubyte * nbytes).from_address(self.address)
        self._unmapped = weakref.finalize(memory, _unmap, base, total)
        self._unmapped.atexit = False
        self.tensor: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def mapped(self) -> bool:
        """Whether the pages are still mapped."""
        return self._unmapped.alive

    def protect(self, access: str, start: int = 0, stop: int | None = None) -> None:
        """Set ``none``, ``read`` or ``write`` access on whole pages of ``[start, stop)``; a forbidden access is a SIGSEGV."""
        stop = self.nbytes if stop is None else stop
        assert start % PAGE == stop % PAGE == 0, (start, stop)
        assert 0 <= start <= stop <= self.nbytes, (start, stop, self.nbytes)
        if start < stop and _libc().mprotect(self.address + start, stop - start, _ACCESS[access]):
            code = ctypes.get_errno()
            raise OSError(code, f"mprotect of [{start}, {stop}): {os.strerror(code)}")

    def populate(self) -> None:
        """Bring every page into this process's page tables, contents kept; afterwards the mapping's PSS is its size."""
        if _libc().madvise(self.address, self.nbytes, _POPULATE_WRITE):
            assert self.tensor is not None
            self.tensor[::PAGE].bitwise_or_(0)  # kernels before 5.14: touch each page

    def release(self) -> None:
        """Drop this window's own tensor; the pages go when nobody else holds one."""
        self.tensor = None


class Segment:
    """One pool: a memfd and its first window. ``logical`` bytes were planned, ``mapped`` bytes are whole pages."""

    def __init__(self, kind: str, logical: int):
        self.kind, self.logical, self.mapped = kind, logical, align_up(logical, PAGE)
        self.fd = os.memfd_create(NAME + kind, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _reserve(self.fd, self.mapped, f"{kind} segment")
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.inode = os.fstat(self.fd).st_ino
            self.window = Window(self.fd, self.mapped)
        except OSError as error:
            os.close(self.fd)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            wanted = format_bytes(self.mapped)
            raise Unavailable(f"{kind} segment: {wanted} wanted, {error.strerror}; free memory or prepare less") from None
        except Unavailable:
            os.close(self.fd)
            raise


class Arena:
    """Every planned buffer of one rank, as views over its segments.

    Views are made once, in the constructor; asking for one later allocates nothing. All bytes start at zero.
    Raises Unavailable when the machine has not enough memory.
    """

    def __init__(self, program: Program, plan: Plan, *, populate: bool = True):
        self.program, self.plan, self.closed = program, plan, False
        self.segments: dict[str, Segment] = {}
        self._raws: dict[str, torch.Tensor] = {}
        self._views: dict[str, dict[str, torch.Tensor]] = {}
        _require(sum(align_up(planned.nbytes, PAGE) for planned in plan.segments), f"arenas of {program.name}")
        try:
            for planned in plan.segments:
                if planned.nbytes:
                    self.segments[planned.kind] = Segment(planned.kind, planned.nbytes)
                    if populate:
                        self.segments[planned.kind].window.populate()
        except Unavailable:
            self.close()
            raise
        for buffer in program.all_buffers:
            place = plan.by_name[buffer.name]
            raw = self._bytes(place.kind, place.offset, place.nbytes)
            self._raws[buffer.name] = raw
            self._views[buffer.name] = {p.name: _plane(raw, p, buffer.plane_offset(p.name)) for p in buffer.planes}

    def _bytes(self, kind: str, offset: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        whole = self.segments[kind].window.tensor
        assert whole is not None
        assert offset + nbytes <= self.segments[kind].logical, (kind, offset, nbytes)
        return whole[offset : offset + nbytes]

    def raw(self, buffer: str) -> torch.Tensor:
        """The buffer as u8 [nbytes]."""
        self._live()
        return self._raws[buffer]

    def view(self, buffer: str, plane: str | None = None) -> torch.Tensor:
        """A plane of the buffer at full prepared size, or its only plane."""
        self._live()
        planes = self._views[buffer]
        if plane is None:
            (only,) = planes.values()
            return only
        return planes[plane]

    def planes(self, buffer: str) -> Mapping[str, torch.Tensor]:
        """Plane name -> view."""
        self._live()
        return self._views[buffer]

    def segment(self, kind: str) -> torch.Tensor:
        """All mapped bytes of a segment as u8, the slack after the planned bytes included."""
        self._live()
        whole = self.segments[kind].window.tensor
        assert whole is not None
        return whole

    def address(self, buffer: str) -> int:
        """Virtual address of the buffer's first byte."""
        place = self.plan.by_name[buffer]
        return self.segments[place.kind].window.address + place.offset

    def fd(self, kind: str) -> int:
        """The segment's memfd: another process may open ``/proc/<pid>/fd/<fd>``."""
        self._live()
        return self.segments[kind].fd

    def second_view(self, kind: str) -> Window:
        """Another mapping of the same pages at another address, protected separately. The caller releases it."""
        self._live()
        return Window(self.segments[kind].fd, self.segments[kind].mapped)

    def ranges(self) -> list[tuple[int, int]]:
        """Address ranges [first, end) of the mapped segments."""
        return [(s.window.address, s.window.address + s.mapped) for s in self.segments.values()]

    def slack(self, kind: str) -> list[tuple[int, int]]:
        """Byte ranges of a segment that no buffer covers: holes between buffers, and the tail up to the page end."""
        spans = sorted((p.offset, p.stop) for p in self.plan.places if p.kind == kind)
        found, at = [], 0
        for start, stop in [*spans, (self.segments[kind].mapped,) * 2]:
            if start > at:
                found.append((at, start))
            at = max(at, stop)
        return found

    @property
    def logical_bytes(self) -> int:
        """Planned bytes of all segments."""
        return sum(s.logical for s in self.segments.values())

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all segments in whole pages; red zones cost none."""
        return sum(s.mapped for s in self.segments.values())

    def close(self) -> list[str]:
        """Give the memory back. Returns the kinds whose pages stay mapped because somebody still holds a tensor over them.

        Such a tensor stays readable; its pages go with it.
        """
        self._raws, self._views, self.closed = {}, {}, True
        segments, self.segments = self.segments, {}
        for segment in segments.values():
            segment.window.release()
            os.close(segment.fd)
        return [kind for kind, segment in segments.items() if segment.window.mapped]

    def _live(self) -> None:
        if self.closed:
            raise UserError("this arena was closed; prepare a new session")


def _plane(raw: torch.Tensor, plane: Plane, offset: int) -> torch.Tensor:
    return raw[offset : offset + plane.nbytes].view(TORCH_DTYPES[plane.dtype]).view(plane.shape)
