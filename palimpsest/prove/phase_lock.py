"""Gate S7, the phase lock: the two histories seen through mappings of their own, each closed while the other may be used.

The same pages are mapped twice more. The index views go through one mapping, the latent views through the other. From the start
of a replay until the latent gather the latent mapping is closed (``PROT_NONE``); from the selection barrier on the index
mapping is. A late or early access then ends the rank with SIGSEGV at the instruction that made it. A handler notes the address
before the rank dies, so that the parent names the view, the phase and the rank. Whole mappings are closed, which holds for any
number of tokens; a lock on one address range alone would need histories of whole pages (tokens in multiples of 1,024).
"""

import ctypes
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from palimpsest.core.spec import Step
from palimpsest.kernels.call import Call, Chunk
from palimpsest.run.arena import Window
from palimpsest.run.execute import Session

_SIGSEGV = 11
#: offset of si_addr in siginfo_t, and bytes of the kernel's and of glibc's struct sigaction at most (Linux, 64-bit)
_SI_ADDR, _SIGACTION = 16, 256
_SA_SIGINFO = 4
#: file of the run's private folder in which a dying rank leaves the address
NOTE = "fault-{rank}"
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@dataclass
class PhaseLock:
    """Hooks of one replay. Use as a context manager around it; the session's views are as before afterwards.

    closed: (buffer, step) -> whether its mapping really was closed when that step began
    """

    session: Session
    early: str
    late: str
    closed: dict[tuple[str, str], bool] = field(default_factory=dict)
    _windows: dict[str, Window] = field(default_factory=dict)
    _kept: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, session: Session) -> "PhaseLock":
        early, late = session.program.histories
        return cls(session, early, late)

    @property
    def edge(self) -> str:
        """Name of the first step that touches the late history: there the lock changes sides."""
        return next(s.name for s in self.session.program.steps if self.late in {name for _, name in s.accesses()})

    def __enter__(self) -> "PhaseLock":
        self._windows = {name: self.session.arena.second_view("reusable") for name in (self.early, self.late)}
        for bound in self.session.bound:
            roles = (*bound.step.reads, *bound.step.writes, *bound.step.updates)
            for role, name in roles:
                if name in self._windows:
                    self._route(bound.call, role, name)
        self._windows[self.late].protect("none")
        return self

    def _route(self, call: Call, role: str, name: str) -> None:
        """Make a step's views of ``name`` go through its own mapping."""
        whole = self._windows[name].tensor
        assert whole is not None
        place = self.session.plan.by_name[name]
        raw = whole[place.offset : place.stop]
        buffer, planes = self.session.program.by_name[name], dict(call.views[role])
        routed = {}
        for plane in buffer.planes:
            at = buffer.plane_offset(plane.name)
            routed[plane.name] = raw[at : at + plane.nbytes].view(planes[plane.name].dtype).view(plane.shape)
        for holder, value in ((call.views, routed), (call.raws, raw)):
            assert isinstance(holder, dict)
            self._kept.append((holder, role, holder[role]))
            holder[role] = value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for holder, role, value in reversed(self._kept):
            holder[role] = value
        self._kept.clear()
        for window in self._windows.values():
            window.protect("write")
            window.release()

    def before(self, step: Step, call: Call, chunk: Chunk) -> None:
        if step.name == self.edge:
            self._windows[self.early].protect("none")
            self._windows[self.late].protect("write")
        touched = {name for _, name in step.accesses()}
        for name in (self.early, self.late):
            if name in touched:
                other = self.late if name == self.early else self.early
                self.closed[other, step.name] = _closed(self._windows[other].address + self.session.plan.by_name[other].offset)

    def after(self, step: Step, call: Call, chunk: Chunk) -> None:
        """Nothing: the lock changes sides when the next step begins."""

    def tap(self, step: Step, event: str, **data: Any) -> None:
        """Nothing to see in events."""

    @property
    def checks(self) -> int:
        """How many (buffer, step) pairs one replay must find closed."""
        return sum(len({self.early, self.late} & {name for _, name in s.accesses()}) for s in self.session.program.steps)

    def ranges(self) -> dict[str, tuple[int, int]]:
        """View -> [first, end) addresses of its mapping."""
        return {name: (w.address, w.address + w.nbytes) for name, w in self._windows.items()}


def _closed(address: int) -> bool:
    """Whether the kernel itself refuses to read one byte at ``address``: a pipe takes the byte, or the call fails with EFAULT."""
    libc = ctypes.CDLL(None, use_errno=True)
    read, write = os.pipe()
    try:
        return libc.write(write, ctypes.c_void_p(address), ctypes.c_size_t(1)) < 0
    finally:
        os.close(read)
        os.close(write)


class FaultNote:
    """While it is open, a SIGSEGV of this process writes ``view`` (or ``elsewhere``) into ``path`` before the process dies as
    it would have.

    The former action of the signal stays: it is put back, and the access faults again.
    """

    def __init__(self, path: Path, lock: PhaseLock):
        self._path, self._lock = path, lock
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._old = ctypes.create_string_buffer(_SIGACTION)
        self._call = _HANDLER(self._note)

    def __enter__(self) -> "FaultNote":
        """glibc's sigaction: handler pointer, mask of 128 bytes, flags."""
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        new = ctypes.create_string_buffer(_SIGACTION)
        handler = ctypes.cast(self._call, ctypes.c_void_p).value
        assert handler is not None
        ctypes.memmove(new, handler.to_bytes(8, "little"), 8)
        ctypes.memmove(ctypes.addressof(new) + 8 + 128, _SA_SIGINFO.to_bytes(4, "little"), 4)
        self._libc.sigaction(_SIGSEGV, new, self._old)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._libc.sigaction(_SIGSEGV, self._old, None)
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    def _note(self, number: int, info: int, context: int) -> None:
        """Runs inside the fault: looks the address up, writes one short line, and lets the access fault again."""
        address = ctypes.c_uint64.from_address(info + _SI_ADDR).value
        view = next((name for name, (first, end) in self._lock.ranges().items() if first <= address < end), "elsewhere")
        os.write(self._fd, view.encode())
        self._libc.sigaction(_SIGSEGV, self._old, None)


def explain_fault(folder: Path, rank: int) -> str:
    """What a rank that died under the lock was touching, or "" when it left no note."""
    path = folder / NOTE.format(rank=rank)
    if not path.is_file():
        return ""
    view = path.read_text(errors="replace")[:64]
    return f"it touched {view} while the phase lock held it closed" if view else ""
