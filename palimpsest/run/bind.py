"""Bind a program's steps to the arena, once: a step is then an implementation and views of what it declares, nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from palimpsest.core.errors import UnknownName
from palimpsest.core.spec import Program, Step
from palimpsest.kernels.call import Call, Implementation, Scratch
from palimpsest.kernels.table import implementation, prepare_engine
from palimpsest.ranks.comm import Comm
from palimpsest.run.arena import Arena


@dataclass(frozen=True)
class Bound:
    """A step, its implementation, and the call the implementation receives at every replay."""

    step: Step
    run: Implementation
    call: Call


def bind(program: Program, arena: Arena, comm: Comm, implementations: Mapping[str, Implementation]) -> tuple[Bound, ...]:
    """One Bound per step, in the program's order. ``implementations``: op -> what runs it; UnknownName for an op without one."""
    return tuple(_bound(step, arena, comm, implementations) for step in program.steps)


def default_implementations(program: Program, engine: str) -> dict[str, Implementation]:
    """Op -> ``engine``'s implementation, for the ops of the program, once this machine has shown that it keeps the engine's
    arithmetic.

    Allocates. Raises UnknownName for an engine or op nobody implements, and Unavailable when rows would change each other's bits.
    """
    prepare_engine(engine, program)
    return {op: implementation(op, engine) for op in dict.fromkeys(step.op for step in program.steps)}


def _bound(step: Step, arena: Arena, comm: Comm, implementations: Mapping[str, Implementation]) -> Bound:
    if step.op not in implementations:
        raise UnknownName(f"op of step {step.name}", step.op, list(implementations))
    roles = (*step.reads, *step.writes, *step.updates)
    scratch = arena.raw(step.scratch_name) if step.scratch else torch.empty(0, dtype=torch.uint8)
    call = Call(
        name=step.name,
        params=dict(step.params),
        views={role: dict(arena.planes(name)) for role, name in roles},
        raws={role: arena.raw(name) for role, name in roles},
        scratch=Scratch(scratch),
        comm=comm,
    )
    return Bound(step, implementations[step.op], call)
