"""What a picture of a plan shows, before any library draws it: rectangles of bytes against steps, phases, the live curve.

Columns: 0 is the start, 1..n the steps in program order, n + 1 the end. A rectangle covers whole columns.
"""

from dataclasses import dataclass

from palimpsest.core.spec import Program
from palimpsest.core.units import format_bytes, format_count
from palimpsest.plan.lifetime import Lifetimes
from palimpsest.plan.plan import Plan

#: labels that still fit side by side on 1280 px
MOST_LABELS = 48
#: what a rectangle is, in legend order
TONES = ("early history", "late history", "inputs and outputs", "rows between steps", "scratch of one step")


@dataclass(frozen=True)
class Rect:
    """One life of one reusable buffer: columns [left, right], bytes [offset, offset + nbytes) of the segment."""

    buffer: str
    tone: str
    left: int
    right: int
    offset: int
    nbytes: int
    about: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.buffer} {format_bytes(self.nbytes)}"

    def wide(self, columns: int) -> bool:
        """Whether an outline and a label help: narrower ones would be hidden by both."""
        return 60 * (self.right - self.left + 1) >= columns


@dataclass(frozen=True)
class Panel:
    """One arrangement."""

    reuse: str
    title: str
    peak: int
    rects: tuple[Rect, ...]


@dataclass(frozen=True)
class Scene:
    """Everything a picture shows.

    steps:  name of every column
    phases: runs (phase, first column, last column); of layers instead where phases are too many to label
    ticks:  columns to label, and the label of each
    legend: tone -> what it stands for here
    live:   live reusable bytes of every column, in whole granules
    shared: bytes [0, shared) that the early history gives to the late one, 0 when it does not
    """

    title: str
    subtitle: str
    steps: tuple[str, ...]
    phases: tuple[tuple[str, int, int], ...]
    ticks: tuple[tuple[int, str], ...]
    legend: dict[str, str]
    panels: tuple[Panel, Panel]
    live: tuple[int, ...]
    lower_bound: int
    shared: int
    digest: str


def scene(program: Program, on: Plan, off: Plan) -> Scene:
    """The picture of both arrangements of ``program``; ``on`` and ``off`` are checked plans of it."""
    lifetimes = Lifetimes(program)
    limits, facts = program.limits, dict(program.facts)
    saved = off.peak - on.peak
    pair = [on.by_name[name] for name in program.histories[:2]]
    shared = max(0, min(p.stop for p in pair) - max(p.offset for p in pair)) if pair else 0
    said = f" One of {limits.ranks} ranks." if limits.ranks > 1 else ""
    kept = f" {format_bytes(off.peak)} -> {format_bytes(on.peak)}: reuse saves {format_bytes(saved)}." if saved else ""
    steps = tuple(lifetimes.step_name(column - 1) for column in range(len(program.steps) + 2))
    phases = _runs([step.phase for step in program.steps])
    if len(phases) > MOST_LABELS:
        phases = _runs([step.name.partition(".")[0] for step in program.steps])
    names = program.histories if len(program.histories) == 2 else TONES[:2]
    return Scene(
        title=f"{program.name}: reusable memory of a prefill",
        subtitle=f"context {format_count(limits.tokens)}, {limits.rows:,} rows, top-k {facts.get('topk', '-')}.{said}{kept}",
        steps=steps,
        phases=phases,
        ticks=_ticks(steps, phases),
        legend=dict(zip(TONES, (*names, *TONES[2:]), strict=True)),
        panels=(_panel(program, lifetimes, off, "before"), _panel(program, lifetimes, on, "after")),
        live=tuple(lifetimes.live_bytes()),
        lower_bound=on.lower_bound,
        shared=shared,
        digest=on.digest,
    )


def _runs(names: list[str]) -> tuple[tuple[str, int, int], ...]:
    runs: list[tuple[str, int, int]] = []
    for column, name in enumerate(names, 1):
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1], column)
        else:
            runs.append((name, column, column))
    return tuple(runs)


def _ticks(steps: tuple[str, ...], runs: tuple[tuple[str, int, int], ...]) -> tuple[tuple[int, str], ...]:
    if len(steps) <= MOST_LABELS:
        return tuple(enumerate(steps))
    return tuple((first, name) for name, first, _ in runs[:: -(-len(runs) // MOST_LABELS)])


def _panel(program: Program, lifetimes: Lifetimes, plan: Plan, when: str) -> Panel:
    rects = []
    under = _under(plan)
    for name in lifetimes.names:
        place, buffer = plan.by_name[name], program.by_name[name]
        shape = "; ".join(f"{p.name} [{', '.join(f'{n:,}' for n in p.shape)}] {p.dtype}" for p in buffer.planes)
        lives = lifetimes.ranges[name]
        for k, life in enumerate(lives):
            first, last = lifetimes.step_name(life.first), lifetimes.step_name(life.last)
            about = [
                f"{place.nbytes:,} B ({format_bytes(place.nbytes)})",
                f"bytes [{place.offset:,}, {place.stop:,})",
                f"shape: {shape}",
                f"formula: {buffer.formula}",
                f"alive: {first} .. {last}" + (f" (life {k + 1} of {len(lives)})" if len(lives) > 1 else ""),
            ]
            if under[name]:
                about.append(f"on the bytes of: {', '.join(under[name])}")
            rects.append(
                Rect(name, _tone(program, name), life.first + 1, life.last + 1, place.offset, place.nbytes, tuple(about))
            )
    reuse = "index history has bytes of its own" if plan.reuse == "off" else "index history lies on the latent history's bytes"
    text = f"{when}, reuse {plan.reuse}" + (f": {reuse}" if program.histories else "")
    return Panel(plan.reuse, text, plan.peak, tuple(rects))


def _under(plan: Plan) -> dict[str, list[str]]:
    """Buffer -> buffers that held some of its bytes before, at most six named."""
    found: dict[str, list[str]] = {place.buffer: [] for place in plan.places}
    for handover in plan.handovers:
        if handover.early not in found[handover.late]:
            found[handover.late].append(handover.early)
    return {name: [*held[:6], f"{len(held) - 6} more"] if len(held) > 6 else held for name, held in found.items()}


def _tone(program: Program, name: str) -> str:
    if name in program.histories:
        return TONES[program.histories.index(name) % 2]
    if name in program.inputs or name in program.outputs:
        return TONES[2]
    return TONES[4] if name.endswith(".scratch") else TONES[3]
