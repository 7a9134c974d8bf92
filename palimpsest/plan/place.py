"""Where buffers lie: identical layers folded, our seeded search, then the optional placer when it is above the bound.

Deterministic: the same program gives the same plan on every machine with the same packages, and on every rank; nothing stops by
the clock, only at the lower bound. Declared histories are placed before everything else, the late one at the lowest offset;
whether the early one may lie on its first bytes is decided by the order of the steps like for any other pair.
"""

from palimpsest.core.errors import BadConfig
from palimpsest.core.spec import KINDS, Buffer, Program
from palimpsest.core.units import align_up
from palimpsest.plan import omni
from palimpsest.plan.certificate import certify
from palimpsest.plan.fold import fold
from palimpsest.plan.lifetime import Lifetimes
from palimpsest.plan.plan import Pin, Place, Plan, Segment
from palimpsest.plan.search import PLACER, RESTARTS, Placement, search

__all__ = ["PLACER", "RESTARTS", "assemble", "place"]


def place(
    program: Program, reuse: str = "on", restarts: int = RESTARTS, *, pins: tuple[Pin, ...] = (), placers: bool = True
) -> Plan:
    """The plan of ``program``: every buffer at an offset of the segment of its kind.

    ``reuse="off"`` is the same plan with the early histories moved behind all other reusable bytes and every other offset
    unchanged, so the two plans differ by exactly those histories' bytes; without histories the offsets are the same either way.
    ``pins`` are kept or refused. ``placers=False`` does not ask the optional package.
    Raises PlanRefused for a program without safe lifetimes and for pins that cannot hold, BadConfig for a buffer without bytes.
    """
    if reuse not in ("on", "off"):
        raise BadConfig(f"reuse is {reuse!r}; it is 'on' or 'off'")
    for buffer in program.all_buffers:
        if buffer.nbytes < 1 or buffer.align < 1:
            raise BadConfig(f"buffer {buffer.name} has {buffer.nbytes} bytes and alignment {buffer.align}; both must be positive")
    lifetimes = Lifetimes(program)
    offsets, placer = _offsets(lifetimes, pins, restarts, placers)
    if reuse == "off":
        _separate(lifetimes, offsets, pins)
    return assemble(lifetimes, offsets, reuse, placer, pins)


def _offsets(lifetimes: Lifetimes, pins: tuple[Pin, ...], restarts: int, placers: bool) -> tuple[dict[str, int], str]:
    """Buffer name -> offset, and who found it: folded first, every buffer for itself only when that is above the bound."""
    if not lifetimes.names:
        return {}, PLACER
    best: Placement | None = None
    problem = fold(lifetimes, pins)
    for whole in (True, False) if problem.folded else (True,):
        tried = problem if whole else fold(lifetimes, pins, whole=False)
        found = search(tried, restarts)
        if placers:
            found = omni.improve(lifetimes, tried, found)
        if best is None or found.peak < best.peak:
            best, problem = found, tried
        if best.peak <= problem.bound:
            break
    assert best is not None
    return problem.spread(best.offsets), best.placer


def _separate(lifetimes: Lifetimes, offsets: dict[str, int], pins: tuple[Pin, ...]) -> None:
    """Move the early histories behind everything; those that lay at one address stay together."""
    program = lifetimes.program
    moved = [name for name in program.histories[::2] if name in offsets]
    asked = [pin for pin in pins if pin.buffer in moved or pin.base in moved]
    if asked:
        raise BadConfig(f"{asked[0].buffer} is pinned and reuse is off, which moves {', '.join(moved[:3])}; drop the pin")
    end = max((offsets[name] + program.by_name[name].nbytes for name in offsets), default=0)
    new: dict[int, int] = {}
    for name in sorted(moved, key=lambda n: (offsets[n], -program.by_name[n].nbytes)):
        buffer = program.by_name[name]
        if offsets[name] not in new:
            new[offsets[name]] = align_up(align_up(end, lifetimes.granule), buffer.align)
            end = new[offsets[name]] + buffer.nbytes
        offsets[name] = new[offsets[name]]


def assemble(lifetimes: Lifetimes, reusable: dict[str, int], reuse: str, placer: str, pins: tuple[Pin, ...] = ()) -> Plan:
    """The plan that puts each reusable buffer at its given offset and stacks all others; proves nothing: ``check`` does."""
    program = lifetimes.program
    offsets, sizes = _stack(program)
    if reusable:
        end = max(reusable[name] + program.by_name[name].nbytes for name in reusable)
        sizes["reusable"] = end if reuse == "off" and program.histories else align_up(end, lifetimes.granule)
    offsets |= reusable
    return Plan(
        program=program.name,
        program_digest=program.digest,
        limits=program.limits,
        reuse=reuse,
        placer=placer,
        pins=pins,
        segments=tuple(Segment(kind, sizes[kind]) for kind in KINDS if kind in sizes),
        places=tuple(_place(buffer, offsets[buffer.name], lifetimes) for buffer in program.all_buffers),
        handovers=certify(lifetimes, reusable),
        lower_bound=lifetimes.lower_bound,
    )


def _stack(program: Program) -> tuple[dict[str, int], dict[str, int]]:
    """Offsets of the buffers that share nothing, one after another, and the size of each kind's segment."""
    offsets: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for buffer in program.all_buffers:
        if buffer.kind != "reusable":
            offsets[buffer.name] = align_up(sizes.get(buffer.kind, 0), buffer.align)
            sizes[buffer.kind] = offsets[buffer.name] + buffer.nbytes
    return offsets, sizes


def _place(buffer: Buffer, offset: int, lifetimes: Lifetimes) -> Place:
    first, last = -1, lifetimes.order.end
    if buffer.kind == "reusable":
        lives = lifetimes.ranges[buffer.name]
        first, last = lives[0].first, lives[-1].last
    names = lifetimes.step_name(first), lifetimes.step_name(last)
    return Place(buffer.name, buffer.kind, offset, buffer.nbytes, buffer.align, *names, first + 1, last + 1)
