"""Where the bytes of a plan go: logical and mapped, per rank and over all ranks, fixed and per token, and what binds the peak.

Logical bytes are what the plan asks for. Mapped bytes are what an allocator with a given granularity maps for the same
segments. Each is computed from the segments, never from the other.
"""

from dataclasses import dataclass
from fractions import Fraction

from palimpsest.core.errors import BadConfig
from palimpsest.core.spec import Buffer, Limits, Program
from palimpsest.core.units import align_up
from palimpsest.plan.lifetime import START, Lifetimes
from palimpsest.plan.plan import Place, Plan

#: mapping granularity of an ordinary page, and of one CUDA allocator segment
CPU_GRANULARITY = 4 << 10
CUDA_GRANULARITY = 2 << 20


@dataclass(frozen=True)
class Slot:
    """One buffer in the bill of one rank, in bytes.

    per_token: bytes one more context token adds on this rank, as a fraction ``"132"`` or ``"33/4"``
    fixed:     bytes that do not grow with the context
    at_peak:   alive at the step where the reusable segment peaks
    worth:     bytes the rank would save without this buffer, everything else placed anew at its lower bound
    why:       the sentence behind ``worth``
    """

    buffer: str
    kind: str
    formula: str
    nbytes: int
    offset: int
    first: str
    last: str
    per_token: str
    fixed: int
    at_peak: bool
    worth: int
    why: str


@dataclass(frozen=True)
class Total:
    """One segment of one rank, in bytes.

    slots:   sum of the buffers' own bytes
    shared:  bytes that sharing saved: slots - (logical - idle)
    idle:    bytes of the segment that belong to no buffer: alignment gaps and holes
    logical: the segment, = slots - shared + idle
    mapped:  the segment in whole granules
    """

    kind: str
    slots: int
    shared: int
    idle: int
    logical: int
    mapped: int


@dataclass(frozen=True)
class Account:
    """The bill of one arrangement on one rank; every rank has the same one.

    apart:       logical bytes if no two buffers shared any
    peak_step:   the step that binds the reusable segment, and ``peak_live`` its buffers, largest first
    per_token:   bytes one more context token adds on one rank while the same step binds, as a fraction
    fixed:       bytes of one rank that do not grow with the context (caches in whole pages and shares count their rounding here)
    """

    plan_digest: str
    reuse: str
    granularity: int
    ranks: int
    slots: tuple[Slot, ...]
    totals: tuple[Total, ...]
    logical: int
    mapped: int
    logical_all_ranks: int
    mapped_all_ranks: int
    apart: int
    peak: int
    lower_bound: int
    peak_step: str
    peak_live: tuple[str, ...]
    per_token: str
    fixed: int


def account(program: Program, plan: Plan, granularity: int = CPU_GRANULARITY) -> Account:
    """The bill of ``plan``, which must be a checked plan of ``program``.

    granularity: bytes of one mapping unit, a power of two. Raises BadConfig for another value.
    """
    if granularity < 1 or granularity & (granularity - 1):
        raise BadConfig(f"granularity is {granularity} bytes; a power of two is wanted, such as 4KiB or 2MiB")
    lifetimes = Lifetimes(program)
    live = lifetimes.live_bytes()
    top = live.index(max(live))
    at_peak = set(lifetimes.live[top]) | ({program.histories[0]} if plan.reuse == "off" and program.histories else set())
    slots = tuple(_slot(program, plan, lifetimes, name, name in at_peak) for name in plan.by_name)
    totals = tuple(_total(plan, segment.kind, granularity) for segment in plan.segments)
    logical, mapped = sum(t.logical for t in totals), sum(t.mapped for t in totals)
    assert logical == plan.total, f"totals give {logical} bytes, the plan has {plan.total}"
    growing = sum((Fraction(s.per_token) for s in slots if s.kind != "reusable" or s.at_peak), Fraction(0))
    return Account(
        plan_digest=plan.digest,
        reuse=plan.reuse,
        granularity=granularity,
        ranks=plan.limits.ranks,
        slots=slots,
        totals=totals,
        logical=logical,
        mapped=mapped,
        logical_all_ranks=logical * plan.limits.ranks,
        mapped_all_ranks=mapped * plan.limits.ranks,
        apart=sum(t.slots for t in totals),
        peak=plan.peak,
        lower_bound=plan.lower_bound,
        peak_step=lifetimes.step_name(top + START),
        peak_live=tuple(sorted(at_peak, key=lambda name: (-plan.by_name[name].nbytes, name))),
        per_token=str(growing),
        fixed=logical - int(growing * plan.limits.tokens),
    )


def slope(buffer: Buffer, limits: Limits) -> Fraction:
    """Bytes one more context token adds to ``buffer`` on one rank: from its axes.

    A plane over ``tokens`` grows by one record; one over ``pages`` grows by this rank's share of a record.
    """
    grows = Fraction(0)
    for plane in buffer.planes:
        if "tokens" in plane.axes:
            grows += Fraction(plane.nbytes, plane.shape[plane.axes.index("tokens")])
        elif "pages" in plane.axes:
            grows += Fraction(plane.nbytes, plane.shape[plane.axes.index("pages")] * limits.page * limits.ranks)
    return grows


def _slot(program: Program, plan: Plan, lifetimes: Lifetimes, name: str, at_peak: bool) -> Slot:
    buffer, place = program.by_name[name], plan.by_name[name]
    grows = slope(buffer, program.limits)
    worth, why = _worth(program, plan, lifetimes, place)
    return Slot(
        buffer=name,
        kind=buffer.kind,
        formula=buffer.formula,
        nbytes=buffer.nbytes,
        offset=place.offset,
        first=place.first,
        last=place.last,
        per_token=str(grows),
        fixed=buffer.nbytes - int(grows * program.limits.tokens),
        at_peak=at_peak,
        worth=worth,
        why=why,
    )


def _worth(program: Program, plan: Plan, lifetimes: Lifetimes, place: Place) -> tuple[int, str]:
    """What removing one buffer would save, by the change of the lower bound, and why."""
    if place.kind != "reusable":
        return place.nbytes, "shares nothing"
    live = lifetimes.live_bytes(without=place.buffer)
    saved = lifetimes.lower_bound - max(live)
    step = lifetimes.step_name(live.index(max(live)) + START)
    if plan.reuse == "off" and program.histories and place.buffer == program.histories[0]:
        return saved + place.nbytes, "has bytes of its own in this arrangement"
    if saved:
        return saved, f"{step} then peaks at {max(live):,} B"
    return 0, f"{step} peaks at {max(live):,} B without it"


def _total(plan: Plan, kind: str, granularity: int) -> Total:
    segment = plan.by_kind[kind]
    inside = sorted((p for p in plan.places if p.kind == kind), key=lambda p: p.offset)
    slots, covered, end = sum(p.nbytes for p in inside), 0, 0
    for place in inside:
        covered += max(0, place.stop - max(end, place.offset))
        end = max(end, place.stop)
    total = Total(
        kind=kind,
        slots=slots,
        shared=slots - covered,
        idle=segment.nbytes - covered,
        logical=segment.nbytes,
        mapped=align_up(segment.nbytes, granularity),
    )
    assert total.slots - total.shared + total.idle == total.logical
    assert kind == "reusable" or not total.shared, f"{kind} buffers share {total.shared} bytes"
    return total


@dataclass(frozen=True)
class Comparison:
    """Both arrangements of one program side by side; savings are ``off`` minus ``on``, per rank, in bytes."""

    on: Account
    off: Account
    saved_logical: int
    saved_mapped: int


def compare(program: Program, on: Plan, off: Plan, granularity: int = CPU_GRANULARITY) -> Comparison:
    """The bills of both arrangements. The logical saving is exactly the early history's bytes, or 0 without histories."""
    one, two = account(program, on, granularity), account(program, off, granularity)
    return Comparison(one, two, two.logical - one.logical, two.mapped - one.mapped)
