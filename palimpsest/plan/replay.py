"""The checker's replay: paint the bytes of the reusable segment step by step, and show that no allowed schedule differs.

A write paints the buffer's bytes with its name; a read needs every byte to carry it still. With several queues, two steps
that touch common bytes must also be ordered by vector clocks. Shares no code with lifetimes or the placer.
"""

from dataclasses import dataclass

from palimpsest.core.spec import Program, Step
from palimpsest.plan.plan import Place, Plan


@dataclass(frozen=True)
class Fault:
    """One broken access and how many bytes it concerns."""

    shared: int
    text: str


class Canvas:
    """Who wrote each byte of the reusable segment last: disjoint spans (start, stop, owner, step)."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, Place, str]] = []

    def paint(self, place: Place, step: str) -> None:
        kept = []
        for start, stop, owner, by in self.spans:
            if start < place.offset:
                kept.append((start, min(stop, place.offset), owner, by))
            if stop > place.stop:
                kept.append((max(start, place.stop), stop, owner, by))
        kept = [span for span in kept if span[0] < span[1]]
        self.spans = [*kept, (place.offset, place.stop, place, step)]

    def fault(self, place: Place, step: str, access: str) -> Fault | None:
        """What is wrong when ``step`` needs the bytes of ``place`` now, if anything."""
        own = 0
        foreign: dict[str, tuple[int, Place, str]] = {}
        for start, stop, owner, by in self.spans:
            size = min(stop, place.stop) - max(start, place.offset)
            if size > 0 and owner.buffer == place.buffer:
                own += size
            elif size > 0:
                foreign[owner.buffer] = (size + (foreign[owner.buffer][0] if owner.buffer in foreign else 0), owner, by)
        if own == place.nbytes:
            return None
        if not foreign:
            lost = place.nbytes - own
            return Fault(
                0,
                f"step {step} {access}s {place.buffer} {byte_range(place)}, of which {lost:,} bytes were never written; "
                f"write {place.buffer} first or name it among the program's inputs",
            )
        size, owner, by = max(foreign.values(), key=lambda item: item[0])
        return Fault(
            size,
            f"step {step} {access}s {place.buffer} {byte_range(place)}, but step {by} wrote {owner.buffer} {byte_range(owner)} "
            f"over it: {size:,} shared bytes are lost",
        )


def replay(program: Program, places: dict[str, Place]) -> list[Fault]:
    faults: list[Fault | None] = []
    canvas = Canvas()
    for name in program.inputs:
        if name in places:
            canvas.paint(places[name], "start")
    for name in program.inputs:
        if name in places:
            faults.append(canvas.fault(places[name], "start", "fill"))
    for step in program.steps:
        access = [(kind, places[name]) for kind, name in step.accesses() if name in places]
        faults += [canvas.fault(place, step.name, kind) for kind, place in access if kind != "write"]
        faults += _inside_one_step(step, [place for _, place in access])
        for kind, place in access:
            if kind == "write":
                canvas.paint(place, step.name)
    faults += [canvas.fault(places[name], "end", "return") for name in program.outputs if name in places]
    return [fault for fault in faults if fault]


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


def unordered(program: Program, plan: Plan) -> list[Fault]:
    """Pairs of accesses to common bytes, at least one of them a write, that some schedule may run in either order."""
    if len({step.queue for step in program.steps}) < 2:
        return []
    clocks, faults = clocks_of(program), []
    places = {place.buffer: place for place in plan.places}
    for j, late in enumerate(program.steps):
        for i, early in enumerate(program.steps[:j]):
            if clocks[j].get(early.queue, 0) < clocks[i][early.queue]:
                faults += _clashes(early, late, places)
    return faults


def _clashes(early: Step, late: Step, places: dict[str, Place]) -> list[Fault]:
    """Common bytes of two unordered steps, unless both only read one buffer."""
    faults = []
    for kind_a, name_a in early.accesses():
        for kind_b, name_b in late.accesses():
            a, b = places[name_a], places[name_b]
            shared = shared_bytes(a, b)
            if shared <= 0 or a.kind != b.kind or (name_a == name_b and kind_a == kind_b == "read"):
                continue
            text = (
                f"steps {early.name} and {late.name} may run at the same time; {early.name} {kind_a}s {name_a} {byte_range(a)}, "
                f"{late.name} {kind_b}s {name_b} {byte_range(b)}, {shared:,} shared bytes; let one wait for the other (after)"
            )
            faults.append(Fault(shared, text))
    return faults


def shared_bytes(a: Place, b: Place) -> int:
    """Bytes two places have in common; zero or negative when they are apart."""
    return min(a.stop, b.stop) - max(a.offset, b.offset)


def byte_range(place: Place) -> str:
    """``"[0, 138,412,032)"``: the bytes of a place inside its segment."""
    return f"[{place.offset:,}, {place.stop:,})"
