"""Ranks in turns: what needs a core or memory of its own is done by as many ranks at once as there are cores.

A turn is a lock on a file of the run's folder, so it goes when its rank dies. It may be held only where no rank is waited for.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from palimpsest.core.spec import Step
from palimpsest.kernels.call import Call, Chunk
from palimpsest.prove.rank_setup import Setup
from palimpsest.ranks.comm import Comm
from palimpsest.run.execute import Hooks

#: ops in which ranks wait for one another
MEETING = frozenset({"gather_history", "exchange_ids", "barrier", "reduce_output"})


class Turns:
    """The turns of one rank; rank r shares a turn with the ranks r + ``slots``, r + 2 ``slots``, ...

    slots: how many ranks may work at once; as many as there are ranks, or none, means that nobody waits
    """

    def __init__(self, folder: Path, rank: int, ranks: int, slots: int):
        self._fd = -1
        if 0 < slots < ranks:
            self._fd = os.open(folder / f"turn-{rank % slots}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self) -> None:
        """Wait for the turn; harmless when it is held."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def give(self) -> None:
        """Let the next rank have it; harmless without it."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.take()
        try:
            yield
        finally:
            self.give()


def turns_of(setup: Setup, comm: Comm) -> Turns:
    """The turns of a rank of a qualification: one rank a core, where each has a process of its own."""
    return Turns(Path(setup.job.workdir), comm.rank, comm.size, len(os.sched_getaffinity(0)) if setup.job.alone else 0)


class InTurn:
    """Hooks around which a rank holds its turn, and with it every step in which no rank is waited for."""

    def __init__(self, hooks: Hooks, turns: Turns):
        self.hooks, self.turns = hooks, turns

    def before(self, step: Step, call: Call, chunk: Chunk) -> None:
        self.turns.take()
        self.hooks.before(step, call, chunk)
        if step.op in MEETING:
            self.turns.give()

    def after(self, step: Step, call: Call, chunk: Chunk) -> None:
        self.turns.take()
        self.hooks.after(step, call, chunk)
        self.turns.give()

    def tap(self, step: Step, event: str, **data: Any) -> None:
        self.hooks.tap(step, event, **data)
