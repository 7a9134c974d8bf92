"""The board: where every rank writes what it is doing, so that a late or dead rank can be named (stdlib only).

One fixed record per rank: calls made, monotonic time, waiting or running, the peer waited for, the phase and the call. On one
host it is a small mapped file in the run's private folder; across hosts the record goes into the rendezvous store. Writing never
blocks on another rank.
"""

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

#: calls u64, monotonic ns u64, waiting i32, peer i32, phase, call
_RECORD = struct.Struct("<QQii52s52s")
RECORD_BYTES = _RECORD.size


@dataclass(frozen=True)
class Progress:
    """One rank's record.

    calls:   exchanges, barriers and agreements entered so far
    ns:      ``time.monotonic_ns()`` of the last change; 0 when the rank has not started
    waiting: inside a call; ``peer`` is the rank waited for, or -1
    """

    calls: int = 0
    ns: int = 0
    waiting: bool = False
    peer: int = -1
    phase: str = "start"
    call: str = ""

    def pack(self) -> bytes:
        return _RECORD.pack(self.calls, self.ns, self.waiting, self.peer, _clip(self.phase), _clip(self.call))

    def __str__(self) -> str:
        if not self.ns:
            return "not started"
        doing = f"waiting in {self.call}" + (f" for rank {self.peer}" if self.peer >= 0 else "") if self.waiting else "running"
        return f"{doing}, phase {self.phase}"


def _clip(text: str) -> bytes:
    return text.encode()[:52]


def unpack(record: bytes) -> Progress:
    calls, ns, waiting, peer, phase, call = _RECORD.unpack(record)
    texts = [raw.rstrip(b"\0").decode(errors="replace") for raw in (phase, call)]
    return Progress(calls, ns, bool(waiting), peer, texts[0] or "start", texts[1])


class Board(Protocol):
    """Records of ``size`` ranks."""

    size: int

    def write(self, rank: int, progress: Progress) -> None: ...

    def read(self, rank: int) -> Progress: ...


class FileBoard:
    """A board in a mapped file of ``size * RECORD_BYTES`` bytes."""

    def __init__(self, path: Path, size: int, *, create: bool = False):
        if create:
            path.write_bytes(bytes(size * RECORD_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size * RECORD_BYTES)
        self.size = size

    def write(self, rank: int, progress: Progress) -> None:
        self._map[rank * RECORD_BYTES : (rank + 1) * RECORD_BYTES] = progress.pack()

    def read(self, rank: int) -> Progress:
        """The record; read until two reads agree, because the writer takes no lock."""
        previous = b""
        for _ in range(8):
            record = self._map[rank * RECORD_BYTES : (rank + 1) * RECORD_BYTES]
            if record == previous:
                break
            previous = record
        return unpack(record)

    def close(self) -> None:
        self._map.close()


class StoreBoard:
    """A board in a torch.distributed store: for ranks that share no file system. Times of other hosts are not comparable."""

    def __init__(self, store: Any, size: int):
        self._store = store
        self.size = size

    def write(self, rank: int, progress: Progress) -> None:
        self._store.set(f"board/{rank}", progress.pack().hex())

    def read(self, rank: int) -> Progress:
        """The record; ``Progress()`` when there is none, or the store is gone with the rank that kept it."""
        key = f"board/{rank}"
        try:
            return unpack(bytes.fromhex(self._store.get(key).decode())) if self._store.check([key]) else Progress()
        except RuntimeError:
            return Progress()


class Reporter:
    """One rank's pen: keeps its record and writes every change to the board."""

    def __init__(self, board: Board, rank: int):
        self.board = board
        self.rank = rank
        self.now = Progress()

    def enter(self, phase: str) -> None:
        self.now = Progress(self.now.calls, time.monotonic_ns(), phase=phase)
        self.board.write(self.rank, self.now)

    def call(self, call: str) -> None:
        self.now = Progress(self.now.calls + 1, time.monotonic_ns(), waiting=True, phase=self.now.phase, call=call)
        self.board.write(self.rank, self.now)

    def wait_for(self, peer: int) -> None:
        now = self.now
        self.now = Progress(now.calls, now.ns, waiting=True, peer=peer, phase=now.phase, call=now.call)
        self.board.write(self.rank, self.now)

    def done(self) -> None:
        self.now = Progress(self.now.calls, time.monotonic_ns(), phase=self.now.phase)
        self.board.write(self.rank, self.now)


def late_rank(records: list[Progress], prefer: int = 0) -> int:
    """The rank that holds the others up: fewest calls made, then one that is running, then ``prefer``, then the lowest."""
    order = sorted(range(len(records)), key=lambda r: (records[r].ns != 0, records[r].calls, records[r].waiting, r != prefer, r))
    return order[0]
