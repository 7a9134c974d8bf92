"""Why the peak of a plan is the peak, and what each reuse of bytes saved: derived from the order of steps and the places."""

from dataclasses import dataclass

from palimpsest.core.spec import Program
from palimpsest.plan.canvas import Canvas
from palimpsest.plan.fold import role_of
from palimpsest.plan.lifetime import START, Lifetimes, LiveRange
from palimpsest.plan.plan import Plan


@dataclass(frozen=True)
class Alive:
    """A buffer that holds bytes somebody needs at the peak.

    role:    what the peak step does with it: ``read``, ``write``, ``update``, or ``hold`` when it only passes by
    writer:  the step that first wrote this life, ``reader`` the last one that touches it
    why:     the sentence
    """

    buffer: str
    nbytes: int
    formula: str
    role: str
    writer: str
    reader: str
    why: str


@dataclass(frozen=True)
class StepLoad:
    """Live reusable bytes while one step runs."""

    step: str
    phase: str
    nbytes: int


@dataclass(frozen=True)
class Reuse:
    """``late`` begins to live on ``saved`` bytes inside [start, stop) of the segment that ``early`` held last.

    saved: bytes that would otherwise have been new ones; over all reuses they add up to what sharing saved in the plan
    chain: steps that order the last access of ``early`` before the first write of ``late``; ``fences``: steps between them where
           all ranks meet
    """

    early: str
    late: str
    start: int
    stop: int
    saved: int
    chain: tuple[str, ...]
    fences: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """The answer of ``palimpsest explain``; bytes of one rank.

    runners_up: the busiest steps of other roles than the peak's, most bytes first: what the peak could fall to at best
    slots:      bytes of all reusable buffers if none shared; ``saved`` of them are shared, the rest is the peak
    """

    program: str
    plan_digest: str
    reuse: str
    peak: int
    lower_bound: int
    peak_step: str
    peak_phase: str
    alive: tuple[Alive, ...]
    runners_up: tuple[StepLoad, ...]
    slots: int
    saved: int
    idle: int
    reuses: tuple[Reuse, ...]


def explain(program: Program, plan: Plan) -> Explanation:
    """Why ``plan``, a checked plan of ``program``, takes what it takes."""
    lifetimes = Lifetimes(program)
    live = lifetimes.live_bytes()
    top = live.index(max(live)) + START
    phase = {step.name: step.phase for step in program.steps}
    order = sorted(range(len(live)), key=lambda i: (-live[i], i))
    loads: dict[str, StepLoad] = {}
    for i in order:
        step = lifetimes.step_name(i + START)
        loads.setdefault(role_of(step), StepLoad(step, phase.get(step, ""), live[i]))
    reuses = _reuses(lifetimes, plan)
    slots = sum(place.nbytes for place in plan.places if place.kind == "reusable")
    saved = sum(reuse.saved for reuse in reuses)
    name = lifetimes.step_name(top)
    return Explanation(
        program=program.name,
        plan_digest=plan.digest,
        reuse=plan.reuse,
        peak=plan.peak,
        lower_bound=lifetimes.lower_bound,
        peak_step=name,
        peak_phase=phase.get(name, ""),
        alive=_alive(lifetimes, top),
        runners_up=tuple(loads.values())[1:6],
        slots=slots,
        saved=saved,
        idle=plan.peak - (slots - saved),
        reuses=reuses,
    )


def _alive(lifetimes: Lifetimes, top: int) -> tuple[Alive, ...]:
    program = lifetimes.program
    roles: dict[str, set[str]] = {}
    if START < top < lifetimes.order.end:
        for access, name in program.steps[top].accesses():
            roles.setdefault(name, set()).add(access)
    found = []
    for name in lifetimes.live_at(top):
        life = next(r for r in lifetimes.ranges[name] if r.first <= top <= r.last)
        touched = roles.get(name, set())
        role = "hold" if not touched else "update" if len(touched) > 1 or "update" in touched else min(touched)
        found.append(
            Alive(name, program.by_name[name].nbytes, program.by_name[name].formula, role, lifetimes.step_name(life.first),
                  lifetimes.step_name(life.last), _why(lifetimes, name, life, role, top))
        )  # fmt: skip
    return tuple(sorted(found, key=lambda a: (-a.nbytes, a.buffer)))


def _why(lifetimes: Lifetimes, name: str, life: LiveRange, role: str, top: int) -> str:
    step, writer, reader = lifetimes.step_name(top), lifetimes.step_name(life.first), lifetimes.step_name(life.last)
    if name == f"{step}.scratch":
        return "scratch of this step alone"
    later = "it is a result" if life.last == lifetimes.order.end else f"{reader} reads it last"
    start = "the caller fills it" if life.first == START else f"{writer} wrote it"
    if role == "write" and life.first == top:
        return f"written here; {later}"
    if life.last == top:
        return f"{start}; read here for the last time"
    if role == "hold":
        return f"{start}; not touched here, but {later}"
    return f"{start}; used here, and {later}"


def _reuses(lifetimes: Lifetimes, plan: Plan) -> tuple[Reuse, ...]:
    """In the order of the later first write. Only the first life of a buffer can save: the bytes of its others are its own."""
    births = sorted((lives[0].first, k, name) for k, (name, lives) in enumerate(lifetimes.ranges.items()))
    chains: dict[tuple[str, str], tuple[str, ...]] = {}
    for handover in plan.handovers:
        if handover.chains:
            chains.setdefault((handover.early, handover.late), max(handover.chains, key=len))
    canvas: Canvas[str] = Canvas()
    found = []
    for _, _, name in births:
        place = plan.by_name[name]
        held: dict[str, list[tuple[int, int]]] = {}
        for start, stop, holder in canvas.under(place.offset, place.stop):
            held.setdefault(holder, []).append((start, stop))
        for early, spans in held.items():
            count = sum(stop - start for start, stop in spans)
            chain = chains.get((early, name), ())
            found.append(Reuse(early, name, spans[0][0], spans[-1][1], count, chain, _fences(lifetimes, early, name)))
        canvas.paint(place.offset, place.stop, name)
    return tuple(found)


def _fences(lifetimes: Lifetimes, early: str, late: str) -> tuple[str, ...]:
    """Steps where all ranks meet, after the last access of ``early`` before ``late`` begins, and not after that beginning."""
    begin = lifetimes.ranges[late][0].first
    last = max((a for life in lifetimes.ranges[early] for a in life.accesses if a < begin), default=START)
    return tuple(lifetimes.program.steps[i].name for i in lifetimes.fences if last <= i <= begin)
