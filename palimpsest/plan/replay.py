"""The checker's replay: paint the bytes of the reusable segment step by step, and show that no allowed schedule differs.

A write paints the buffer's bytes with its name; a read needs every byte to carry it still. With several queues, two steps
that touch common bytes must also be ordered by vector clocks. Shares no code with lifetimes or the placer.
"""

from dataclasses import dataclass

from palimpsest.core.spec import Program, Step
from palimpsest.plan.canvas import Canvas
from palimpsest.plan.plan import Place, Plan


@dataclass(frozen=True)
class Fault:
    """One broken access and how many bytes it concerns."""

    shared: int
    text: str


def replay(program: Program, places: dict[str, Place]) -> list[Fault]:
    faults: list[Fault | None] = []
    canvas: Canvas[tuple[Place, str]] = Canvas()
    inputs = [places[name] for name in program.inputs if name in places]
    for place in inputs:
        canvas.paint(place.offset, place.stop, (place, "start"))
    faults += [_needs(canvas, place, "start", "fill") for place in inputs]
    for step in program.steps:
        access = [(kind, places[name]) for kind, name in step.accesses() if name in places]
        faults += [_needs(canvas, place, step.name, kind) for kind, place in access if kind != "write"]
        faults += _inside_one_step(step, [place for _, place in access])
        for kind, place in access:
            if kind == "write":
                canvas.paint(place.offset, place.stop, (place, step.name))
    faults += [_needs(canvas, places[name], "end", "return") for name in program.outputs if name in places]
    return [fault for fault in faults if fault]


def _needs(canvas: Canvas[tuple[Place, str]], place: Place, step: str, access: str) -> Fault | None:
    """What is wrong when ``step`` needs the bytes of ``place`` now, if anything."""
    own = 0
    foreign: dict[str, tuple[int, Place, str]] = {}
    for start, stop, (owner, by) in canvas.under(place.offset, place.stop):
        if owner.buffer == place.buffer:
            own += stop - start
        else:
            foreign[owner.buffer] = (stop - start + (foreign[owner.buffer][0] if owner.buffer in foreign else 0), owner, by)
    if own == place.nbytes:
        return None
    if not foreign:
        return Fault(
            0,
            f"step {step} {access}s {place.buffer} {byte_range(place)}, of which {place.nbytes - own:,} bytes were never "
            f"written; write {place.buffer} first or name it among the program's inputs",
        )
    size, owner, by = max(foreign.values(), key=lambda item: item[0])
    return Fault(
        size,
        f"step {step} {access}s {place.buffer} {byte_range(place)}, but step {by} wrote {owner.buffer} {byte_range(owner)} "
        f"over it: {size:,} shared bytes are lost",
    )


def _inside_one_step(step: Step, places: list[Place]) -> list[Fault | None]:
    """Buffers that one step touches are all alive during it."""
    return [
        Fault(
            shared_bytes(a, b),
            f"step {step.name} uses {a.buffer} {byte_range(a)} and {b.buffer} {byte_range(b)} together, "
            f"which share {shared_bytes(a, b):,} bytes",
        )
        for i, a in enumerate(places)
        for b in places[i + 1 :]
        if a.buffer != b.buffer and shared_bytes(a, b) > 0
    ]


def clocks_of(program: Program) -> list[dict[str, int]]:
    """Vector clocks: for each step, how many steps of each queue are finished once it is."""
    clocks: list[dict[str, int]] = []
    at_name: dict[str, dict[str, int]] = {}
    at_queue: dict[str, dict[str, int]] = {}
    for step in program.steps:
        clock: dict[str, int] = {}
        for seen in [at_queue.get(step.queue, {}), *(at_name[name] for name in step.after)]:
            for queue, count in seen.items():
                clock[queue] = max(clock.get(queue, 0), count)
        clock[step.queue] = at_queue.get(step.queue, {}).get(step.queue, 0) + 1
        at_name[step.name] = at_queue[step.queue] = clock
        clocks.append(clock)
    return clocks


@dataclass(frozen=True)
class Touch:
    """One access: position of the step, kind, buffer."""

    at: int
    kind: str
    buffer: str


def unordered(program: Program, plan: Plan) -> list[Fault]:
    """Pairs of accesses to common bytes, at least one of them a write, that some schedule may run in either order.

    Every byte remembers, per queue, the last access and the last write: if that one is ordered before a step, so are all
    earlier ones of its queue.
    """
    if len({step.queue for step in program.steps}) < 2:
        return []
    clocks = clocks_of(program)
    faults: dict[tuple[Touch, Touch], Fault] = {}
    places = {place.buffer: place for place in plan.places}
    cells = _cells(plan)
    latest: dict[tuple[str, int], dict[str, Touch]] = {}
    writers: dict[tuple[str, int], dict[str, Touch]] = {}
    for j, late in enumerate(program.steps):
        for kind, name in late.accesses():
            touch = Touch(j, kind, name)
            for cell in cells[name]:
                key = (places[name].kind, cell)
                for seen in (latest.setdefault(key, {}), writers.setdefault(key, {})):
                    for queue, old in seen.items():
                        both_read = old.buffer == name and old.kind == kind == "read"
                        if not both_read and old.at != j and clocks[j].get(queue, 0) < clocks[old.at][queue]:
                            faults[old, touch] = _clash(program, places, old, touch)
                latest[key][late.queue] = touch
                if kind != "read":
                    writers[key][late.queue] = touch
    return list(faults.values())


def _cells(plan: Plan) -> dict[str, range]:
    """The bytes of each segment cut wherever a buffer begins or ends: buffer -> numbers of its pieces."""
    found: dict[str, range] = {}
    for segment in plan.segments:
        inside = [place for place in plan.places if place.kind == segment.kind]
        edges = sorted({edge for place in inside for edge in (place.offset, place.stop)})
        at = {edge: i for i, edge in enumerate(edges)}
        found |= {place.buffer: range(at[place.offset], at[place.stop]) for place in inside}
    return found


def _clash(program: Program, places: dict[str, Place], old: Touch, new: Touch) -> Fault:
    a, b = places[old.buffer], places[new.buffer]
    early, late, shared = program.steps[old.at].name, program.steps[new.at].name, shared_bytes(a, b)
    return Fault(
        shared,
        f"steps {early} and {late} may run at the same time; {early} {old.kind}s {a.buffer} {byte_range(a)}, "
        f"{late} {new.kind}s {b.buffer} {byte_range(b)}, {shared:,} shared bytes; let one wait for the other (after)",
    )


def shared_bytes(a: Place, b: Place) -> int:
    """Bytes two places have in common; zero or negative when they are apart."""
    return min(a.stop, b.stop) - max(a.offset, b.offset)


def byte_range(place: Place) -> str:
    """``"[0, 138,412,032)"``: the bytes of a place inside its segment."""
    return f"[{place.offset:,}, {place.stop:,})"
