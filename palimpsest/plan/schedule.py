"""Other schedules of a program: steps on several queues with the events their data needs, and two requests interleaved.

Every function returns a Program; whether bytes may be shared under it is decided by lifetimes and the checker like for any other.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from palimpsest.core.errors import BadConfig
from palimpsest.core.spec import Buffer, Limits, Program, Step

#: kinds of bytes that requests of one model share: nobody writes them
SHARED = ("weights", "table")


def on_queues(program: Program, queues: Mapping[str, str]) -> Program:
    """The same steps in the same order, the named ones on other queues, with an event wherever data crosses queues.

    queues: step name -> queue. An event is added for the last conflicting access of every other queue, so no step races on one
    buffer; two buffers that share bytes need more, which is the planner's business. Raises BadConfig for an unknown step.
    """
    unknown = sorted(set(queues) - {step.name for step in program.steps})
    if unknown:
        raise BadConfig(f"program {program.name} has no step {unknown[0]!r}")
    latest: dict[str, dict[str, str]] = {}
    writers: dict[str, dict[str, str]] = {}
    steps = []
    for step in program.steps:
        queue = queues.get(step.name, step.queue)
        after = dict.fromkeys(step.after)
        for access, name in step.accesses():
            seen = writers if access == "read" else latest
            after |= dict.fromkeys(other for q, other in seen.get(name, {}).items() if q != queue)
        for access, name in step.accesses():
            latest.setdefault(name, {})[queue] = step.name
            if access != "read":
                writers.setdefault(name, {})[queue] = step.name
        steps.append(dataclasses.replace(step, queue=queue, after=tuple(after)))
    return program.with_steps(tuple(steps))


def renamed(program: Program, prefix: str, kept: Iterable[str] = SHARED) -> Program:
    """Every step, and every buffer whose kind is not ``kept``, with ``prefix`` before its name."""
    keep = set(kept)
    name = {b.name: b.name if b.kind in keep else prefix + b.name for b in program.buffers}
    name |= {s.scratch_name: prefix + s.scratch_name for s in program.steps}

    def roles(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((role, name[buffer]) for role, buffer in pairs)

    def step(s: Step) -> Step:
        after = tuple(prefix + n for n in s.after)
        return dataclasses.replace(
            s, name=prefix + s.name, reads=roles(s.reads), writes=roles(s.writes), updates=roles(s.updates), after=after
        )

    return dataclasses.replace(
        program,
        name=prefix + program.name,
        buffers=tuple(dataclasses.replace(b, name=name[b.name]) for b in program.buffers),
        steps=tuple(map(step, program.steps)),
        histories=tuple(name[n] for n in program.histories),
        inputs=tuple(name[n] for n in program.inputs),
        outputs=tuple(name[n] for n in program.outputs),
    )


def interleaved(first: Program, second: Program, *, own_queues: bool = False, turn: int = 1) -> Program:
    """Two requests of one model: ``turn`` steps of the first (``a.``), then of the second (``b.``), and so on.

    Weights and tables are the same bytes for both. On one queue the interleaving is the schedule; with ``own_queues`` each
    request has its queues for itself and only what it declares orders it. Raises BadConfig for different limits.
    """
    if first.limits != second.limits:
        raise BadConfig(f"two requests of one program need one set of limits; these have {first.limits} and {second.limits}")
    one, two = renamed(first, "a."), renamed(second, "b.")
    if own_queues:
        one, two = (on_queues(p, {s.name: f"{k}.{s.queue}" for s in p.steps}) for k, p in (("a", one), ("b", two)))
    return joined(f"{first.name} beside {second.name}", first.limits, (one, two), _alternate(one.steps, two.steps, turn))


def joined(name: str, limits: Limits, parts: tuple[Program, ...], steps: tuple[Step, ...]) -> Program:
    """One program of several: buffers of one name must be one buffer. Raises BadConfig when they differ."""
    buffers: dict[str, Buffer] = {}
    for part in parts:
        for buffer in part.buffers:
            if buffers.setdefault(buffer.name, buffer) != buffer:
                raise BadConfig(f"{part.name} declares {buffer.name} differently from another part of {name}")
    return Program(
        name=name,
        limits=limits,
        buffers=tuple(buffers.values()),
        steps=steps,
        histories=tuple(n for part in parts for n in part.histories),
        inputs=tuple(dict.fromkeys(n for part in parts for n in part.inputs)),
        outputs=tuple(dict.fromkeys(n for part in parts for n in part.outputs)),
        facts=parts[0].facts,
    )


def _alternate(one: tuple[Step, ...], two: tuple[Step, ...], turn: int) -> tuple[Step, ...]:
    steps: list[Step] = []
    for at in range(0, max(len(one), len(two)), turn):
        steps += [*one[at : at + turn], *two[at : at + turn]]
    return tuple(steps)
