"""Runs jobs in processes of their own: per-job timeout, retry, and nobody left behind.

Pools lose pending jobs when a worker dies, and none can kill the compiler a worker started. Here every job is one process in one
session; whatever happens to it, its whole process group is killed. A worker ends itself, and its group, when its standard input
closes: so nothing outlives a supervisor that was killed.
"""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from palimpsest.core.errors import Unavailable

#: seconds between two looks at the running jobs
POLL_S = 0.05
#: exit code of a job that another attempt would not help (EX_CANTCREAT of sysexits.h)
GIVE_UP = 73


@dataclass(frozen=True)
class Job:
    """name: for messages; command: what is run; log: file for its output."""

    name: str
    command: tuple[str, ...]
    log: Path


@dataclass(frozen=True)
class Event:
    """Something happened to a job: ``started``, ``done``, ``retry`` or ``failed``; ``why`` says what went wrong."""

    job: str
    kind: str
    attempt: int
    seconds: float = 0.0
    why: str = ""


@dataclass
class _Running:
    job: Job
    attempt: int
    process: "subprocess.Popen[bytes]"
    since: float

    def reap(self) -> None:
        """Kill the whole group: a compiler that outlived its worker, or a worker that is late."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


class Supervisor:
    """At most ``workers`` jobs at once, each for at most ``timeout_s`` seconds and ``retries`` further attempts."""

    def __init__(
        self, workers: int = 2, *, timeout_s: float = 900.0, retries: int = 1, notify: Callable[[Event], None] | None = None
    ):
        self.workers, self.timeout_s, self.retries = workers, timeout_s, retries
        self.notify = notify if notify is not None else lambda event: None

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs. Raises Unavailable naming the first job that failed every attempt; the others are stopped."""
        waiting = deque((job, 1) for job in jobs)
        running: list[_Running] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    running.append(self._start(*waiting.popleft()))
                for one in [r for r in running if self._ended(r)]:
                    running.remove(one)
                    again = self._settle(one)
                    if again:
                        waiting.append((one.job, one.attempt + 1))
                time.sleep(POLL_S)
        finally:
            for one in running:
                one.reap()

    def _start(self, job: Job, attempt: int) -> _Running:
        with job.log.open("wb") as log:
            process = subprocess.Popen(
                job.command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.notify(Event(job.name, "started", attempt))
        return _Running(job, attempt, process, time.monotonic())

    def _ended(self, one: _Running) -> bool:
        return one.process.poll() is not None or time.monotonic() - one.since > self.timeout_s

    def _settle(self, one: _Running) -> bool:
        """Clean up after an ended job; whether it is to be tried again."""
        code, seconds = one.process.poll(), time.monotonic() - one.since
        one.reap()
        if code == 0:
            self.notify(Event(one.job.name, "done", one.attempt, seconds))
            return False
        why = (
            f"took more than {self.timeout_s:g} s"
            if code is None
            else f"was killed by signal {-code}"
            if code < 0
            else "gave up"
            if code == GIVE_UP
            else f"ended with {code}"
        )
        if one.attempt <= self.retries and code != GIVE_UP:
            self.notify(Event(one.job.name, "retry", one.attempt, seconds, why))
            return True
        self.notify(Event(one.job.name, "failed", one.attempt, seconds, why))
        words = last_words(one.job.log)
        if code == GIVE_UP:
            raise Unavailable(f"compiling {one.job.name}: {words}")
        raise Unavailable(f"compiling {one.job.name} {why} in attempt {one.attempt}; last words: {words}")


def last_words(log: Path, most: int = 300) -> str:
    """The end of a job's output, on one line."""
    text = log.read_bytes()[-4000:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "(none)")[:most]
