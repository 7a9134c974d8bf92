"""What the parent of real ranks does while they run: read their output and reports, notice who dies, hangs or raises, and say so
once.

The first failing rank wins, but a rank that only saw a peer vanish is given a moment to be overruled by the cause.
"""

import json
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from palimpsest.core.errors import RankError
from palimpsest.ranks.board import FileBoard, Progress, late_rank
from palimpsest.ranks.failures import START

#: longest report line of a rank, in bytes
MAX_REPORT = 16 << 20
_MAX_LINE = 64 << 10
_TICK_S = 0.2
#: seconds to wait for a better explanation: after a cause, and after a mere symptom
_SETTLE_S, _SYMPTOM_S = 0.2, 1.0
#: seconds the ranks have to report a missed deadline themselves before the parent does
_SLACK_S = 0.5

OnEvent = Callable[[int, Any], None]


class Lines:
    """Splits a pipe into lines and hands each to ``take``; a line without end is cut at ``limit`` bytes."""

    def __init__(self, descriptor: int, take: Callable[[bytes], None], limit: int):
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._take = take
        self._limit = limit
        self._part = bytearray()

    def pump(self) -> bool:
        """Read what is there. False at end of file."""
        while True:
            try:
                piece = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                return True
            self._part += piece
            *lines, rest = self._part.split(b"\n")
            self._part = bytearray(rest)
            if not piece or len(self._part) > self._limit:
                lines += [self._part] if self._part else []
                self._part = bytearray()
            for line in lines:
                self._take(bytes(line))
            if not piece:
                return False


class Log:
    """All ranks' output in one file, each line prefixed; the last lines of each rank are kept for error messages."""

    def __init__(self, path: Path | None, size: int):
        self.path = path
        self._file: IO[bytes] | None = path.open("ab") if path else None
        self._tails: list[deque[str]] = [deque(maxlen=8) for _ in range(size + 1)]
        self._size = size

    def write(self, rank: int, line: bytes) -> None:
        """``rank == size`` is the template."""
        name = b"start  " if rank == self._size else b"rank %02d" % rank
        if self._file:
            self._file.write(b"[%s] %s\n" % (name, line))
        self._tails[rank].append(line.decode(errors="replace")[:300])

    def tail(self, rank: int) -> str:
        """How an error message says where to look."""
        if self.path:
            return f"; output in {self.path}"
        lines = [line for line in self._tails[rank] if line.strip()][-3:]
        return "; last output: " + " | ".join(lines) if lines else ""

    def close(self) -> None:
        if self._file:
            self._file.close()


class Watch:
    """The state of one run. ``run`` returns when every rank ended well, and raises RankError otherwise."""

    def __init__(self, size: int, *, board: FileBoard, log: Log, deadline_s: float, start_s: float, on_event: OnEvent | None):
        self.size = size
        self.pids: list[int] = []
        self.values: dict[int, Any] = {}
        self._exits: dict[int, int] = {}
        self._reported: set[int] = set()
        self._board = board
        self._log = log
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._on_event = on_event
        self._begun = time.monotonic()
        self._failures: list[tuple[bool, float, RankError]] = []
        self._decide_at = float("inf")
        self._selector = selectors.DefaultSelector()
        self._reports: list[Lines] = []

    def listen(self, status: int, outputs: list[int], reports: list[int]) -> None:
        """Register the pipes: the template's facts, every rank's output (then the template's), every rank's reports."""
        lines = [Lines(status, self._fact, _MAX_LINE)]
        lines += [Lines(descriptor, partial(self._log.write, rank), _MAX_LINE) for rank, descriptor in enumerate(outputs)]
        self._reports = [Lines(descriptor, partial(self._report, rank), MAX_REPORT) for rank, descriptor in enumerate(reports)]
        lines += self._reports
        for each in lines:
            self._selector.register(each.descriptor, selectors.EVENT_READ, each)
        self._status = status

    def run(self, dump: Callable[[int], None]) -> None:
        """Watch to the end. ``dump(rank)`` asks a late rank to write its stacks to the log."""
        while len(self._exits) < self.size or self._failures:
            self.pump(min(_TICK_S, max(0.0, self._decide_at - time.monotonic())))
            if not self._failures:
                self._check_deadlines(dump)
            if time.monotonic() >= self._decide_at:
                raise self._verdict()

    def pump(self, timeout_s: float) -> bool:
        """Handle what arrived. False when every pipe is at its end."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd in self._selector.get_map() and not key.data.pump():
                self._selector.unregister(key.fd)
                if key.fd == self._status and len(self._exits) < self.size:
                    self._template_ended()
        return bool(self._selector.get_map())

    def drain(self, timeout_s: float) -> bool:
        """Only keep logging: the verdict is known. False when every pipe is at its end."""
        self._on_event = None
        return self.pump(timeout_s)

    def close(self) -> None:
        self._selector.close()

    # -- what arrives

    def _fact(self, line: bytes) -> None:
        fact = json.loads(line)
        if "started" in fact:
            self.pids = fact["started"]
            return
        rank = fact["exit"]
        self._reports[rank].pump()  # the rank is dead: everything it said is in the pipe
        self._exits[rank] = fact["status"]
        if rank not in self._reported:
            self._fail(RankError(_death(fact["status"]) + self._log.tail(rank), rank=rank, phase=self._phase(rank)))

    def _report(self, rank: int, line: bytes) -> None:
        try:
            fact = json.loads(line)
        except ValueError:
            self._fail(RankError(f"sent a report that is not JSON ({len(line)} bytes)", rank=rank, phase=self._phase(rank)))
            return
        if "event" in fact:
            if self._on_event:
                self._on_event(rank, fact["event"])
            return
        self._reported.add(rank)
        if "done" in fact:
            self.values[rank] = fact["done"]
            return
        error = fact["error"]
        where = {"rank": error["rank"], "phase": error["phase"], "secondary": error["secondary"]}
        failure = RankError(error["message"] + (self._log.tail(rank) if self._log.path else ""), **where)
        failure.exit_code = error["exit_code"]
        self._fail(failure)

    def _template_ended(self) -> None:
        message = "the process that starts the ranks ended first" + self._log.tail(self.size)
        self._fail(RankError(message, rank=0, phase=START, secondary=bool(self.pids)))

    # -- judging

    def _fail(self, failure: RankError) -> None:
        now = time.monotonic()
        self._failures.append((failure.secondary, now, failure))
        self._decide_at = min(self._decide_at, now + (_SYMPTOM_S if failure.secondary else _SETTLE_S))

    def _verdict(self) -> RankError:
        """Causes before symptoms, then the first; ranks that failed alike in the same moment are named by the lowest."""
        secondary, _, first = min(self._failures, key=lambda failure: failure[:2])
        if secondary and (stopped := self._stopped()):
            return self._late(stopped[0], "is stopped by a signal (SIGSTOP)")
        alike = [f for s, _, f in self._failures if s == secondary and f.message == first.message]
        return min(alike, key=lambda failure: failure.rank)

    def _check_deadlines(self, dump: Callable[[int], None]) -> None:
        records = [self._board.read(rank) for rank in range(self.size)]
        overdue = [rank for rank, record in enumerate(records) if rank not in self._exits and self._overdue(record)]
        if not overdue:
            return
        finished = Progress(calls=1 << 62, ns=1, waiting=True)
        rank = (self._stopped() or [late_rank([finished if r in self._exits else records[r] for r in range(self.size)])])[0]
        dump(rank)
        self._fail(self._late(rank, "made no progress"))

    def _late(self, rank: int, how: str) -> RankError:
        record = self._board.read(rank)
        message = f"late: {how} within {self._limit(record):g} s ({record}){self._log.tail(rank)}"
        return RankError(message, rank=rank, phase=record.phase, secondary=True)

    def _limit(self, record: Progress) -> float:
        return self._start_s if not record.ns or record.phase == "connect" else self._deadline_s

    def _overdue(self, record: Progress) -> bool:
        since = record.ns / 1e9 if record.ns else self._begun
        return time.monotonic() - since > self._limit(record) + _SLACK_S

    def _stopped(self) -> list[int]:
        return [rank for rank, pid in enumerate(self.pids) if rank not in self._exits and process_stat(pid)[0] in "Tt"]

    def _phase(self, rank: int) -> str:
        return self._board.read(rank).phase


def process_stat(pid: int) -> list[str]:
    """State letter, parent, group and session of a process, from the kernel; ``?`` when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return ["?"] * 4


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"died: killed by {signal.Signals(number).name if number in list(signal.Signals) else f'signal {number}'}"
    return f"died: exited with code {os.WEXITSTATUS(status)} without a result"
