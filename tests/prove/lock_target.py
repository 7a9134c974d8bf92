"""What a real rank runs in the tests of the phase lock: a layer under the lock in which one rank touches a history too late or
too early."""

from pathlib import Path
from typing import Any

import torch

from palimpsest.kernels.call import Call, Chunk, Implementation
from palimpsest.prove.phase_lock import NOTE, FaultNote, PhaseLock
from palimpsest.prove.rank_setup import Job, Setup
from palimpsest.ranks.comm import Comm
from palimpsest.run.bind import default_implementations
from palimpsest.run.execute import Session, prepare


def run(comm: Comm, config: dict[str, Any], emit: Any) -> dict[str, Any]:
    """``config``: a job, and ``touch``: (rank, op in which it touches, step whose view it uses, role, plane) or None."""
    setup = Setup(Job.from_json(config["job"]))
    held: list[Session] = []
    known = default_implementations(setup.program, "portable")
    implementations = dict(known)
    if config["touch"]:
        rank, op, step, role, plane = config["touch"]
        implementations[op] = _touching(known[op], held, rank=rank, step=step, role=role, plane=plane)
    with prepare(setup.program, setup.plans["alias"], comm=comm, fill=setup.filler(), implementations=implementations) as session:
        held.append(session)
        lock = PhaseLock.of(session)
        with lock, FaultNote(Path(setup.job.workdir) / NOTE.format(rank=comm.rank), lock):
            session.prefill(torch.zeros((16, setup.geometry.hidden), dtype=torch.bfloat16), 64, hooks=lock)
        return {
            "closed": sorted(f"{view} in {where}" for (view, where), closed in lock.closed.items() if closed),
            "checks": lock.checks,
        }


def _touching(inner: Implementation, held: list[Session], *, rank: int, step: str, role: str, plane: str) -> Implementation:
    def touching(call: Call, chunk: Chunk) -> None:
        inner(call, chunk)
        if held and call.comm.rank == rank:
            bound = next(b for b in held[0].bound if b.step.name == step)
            bound.call.view(role, plane)[:1].clone()

    return touching
