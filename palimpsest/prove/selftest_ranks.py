"""What a real rank runs in the self-test's process mutants: one prepared layer and one replay, in which rank 1 goes wrong.

The target of ``ranks.spawn``. Returns what ``rank_main`` would say about itself, so that the parent's cells (L1-L4) can be made.
"""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from palimpsest.core.spec import Step
from palimpsest.kernels.call import TORCH_DTYPES, Call, Chunk, Implementation
from palimpsest.prove.extras import identity
from palimpsest.prove.phase_lock import NOTE, FaultNote, PhaseLock
from palimpsest.prove.rank_setup import Job, Setup
from palimpsest.ranks.comm import Comm
from palimpsest.run.bind import default_implementations
from palimpsest.run.execute import Session, prepare

#: the rank that goes wrong
VICTIM = 1


def run(comm: Comm, config: dict[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """``config``: a job, and the mutant's action and argument."""
    import torch

    setup, action, argument = Setup(Job.from_json(config["job"])), config["action"], config["argument"]
    stated = identity(setup)
    if action in ("other_source", "other_plan") and comm.rank == VICTIM:
        stated[argument] = "0" * 64
    for name, value in stated.items():
        comm.agree(f"same {name}", value)
    emit({"phase": "agreed"})
    held: list[Session] = []
    bound: Mapping[str, Implementation] = default_implementations(setup.program, setup.job.engine)
    if action == "early_read" and comm.rank == VICTIM:
        bound = {**bound, "index_select": _early(bound["index_select"], held)}
    with prepare(setup.program, setup.plans["alias"], comm=comm, fill=setup.filler(), implementations=bound) as session:
        held.append(session)
        hidden = torch.zeros((setup.profile.rows, setup.geometry.hidden), dtype=TORCH_DTYPES[setup.job.formats.activation])
        if action == "early_read":
            lock = PhaseLock.of(session)
            with lock, FaultNote(Path(setup.job.workdir) / NOTE.format(rank=comm.rank), lock):
                session.prefill(hidden, 64, hooks=lock)
        else:
            session.prefill(hidden, 64, hooks=Wrong(action, argument, comm.rank))
        comm.barrier("done")
    deadline = str(float(getattr(comm, "deadline_s", 0)))
    if action == "no_deadline" and comm.rank == VICTIM:
        deadline = "None"
    return {"flags": [], "extras": {"identity": {**stated, "pid": os.getpid(), "deadline_s": deadline}}}


class Wrong:
    """Hooks that end, stop or raise in rank 1 when the first step of a phase begins."""

    def __init__(self, action: str, phase: str, rank: int):
        self.action, self.phase, self.rank = action, phase, rank

    def before(self, step: Step, call: Call, chunk: Chunk) -> None:
        if self.rank != VICTIM or step.phase != self.phase:
            return
        if self.action == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.action == "raises":
            raise ValueError("planted by the self-test")

    def after(self, step: Step, call: Call, chunk: Chunk) -> None:
        """Everything happens before a step."""

    def tap(self, step: Step, event: str, **data: Any) -> None:
        """Nothing to see in events."""


def _early(inner: Implementation, held: list[Session]) -> Implementation:
    def early(call: Call, chunk: Chunk) -> None:
        if held:
            attend = next(b for b in held[0].bound if b.step.name == "sparse_attend")
            attend.call.view("latent_history")[:1].clone()
        inner(call, chunk)

    return early
