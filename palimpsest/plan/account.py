"""Where the bytes of a plan go: logical and mapped, per rank and over all ranks, fixed and per token, and what binds the peak.

Logical bytes are what the plan asks for. Mapped bytes are what an allocator with a given granularity maps for the same
segments. Each is computed from the segments, never from the other.
"""

from dataclasses import dataclass
from fractions import Fraction

from palimpsest.core.errors import BadConfig
from palimpsest.core.spec import Buffer, Limits, Program
from palimpsest.core.units import align_up
from palimpsest.plan.fold import role_of
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
    at_peak = set(lifetimes.live[top]) | (set(program.histories[::2]) if plan.reuse == "off" else set())
    peaks = _Peaks(lifetimes)
    slots = tuple(_slot(program, plan, peaks, name, name in at_peak) for name in plan.by_name)
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


class _Peaks:
    """Where the live bytes are largest, and what is left without some buffers; asked once per buffer."""

    def __init__(self, lifetimes: Lifetimes):
        self.lifetimes, self.live = lifetimes, lifetimes.live_bytes()
        self.bound = max(self.live)
        tops: dict[tuple[str, ...], int] = {}
        for position, (names, nbytes) in enumerate(zip(lifetimes.live, self.live, strict=True)):
            if nbytes == self.bound:
                tops.setdefault(names, position)
        self.tops = [(frozenset(names), position) for names, position in tops.items()]

    def without(self, gone: frozenset[str]) -> tuple[int, str]:
        """The largest sum of live bytes when ``gone`` is not there, and the step it is at."""
        for names, position in self.tops:
            if not names & gone:
                return self.bound, self.lifetimes.step_name(position + START)
        size = {name: self.lifetimes.slot_bytes(name) for name in gone if name in self.lifetimes.ranges}
        left = [
            nbytes - sum(size[name] for name in names if name in gone)
            for names, nbytes in zip(self.lifetimes.live, self.live, strict=True)
        ]
        return max(left), self.lifetimes.step_name(left.index(max(left)) + START)


def _slot(program: Program, plan: Plan, peaks: _Peaks, name: str, at_peak: bool) -> Slot:
    buffer, place = program.by_name[name], plan.by_name[name]
    grows = slope(buffer, program.limits)
    worth, why = _worth(program, plan, peaks, place)
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


def _worth(program: Program, plan: Plan, peaks: _Peaks, place: Place) -> tuple[int, str]:
    """What removing one buffer would save, by the change of the lower bound, and why."""
    if place.kind != "reusable":
        return place.nbytes, "shares nothing"
    left, step = peaks.without(frozenset((place.buffer,)))
    saved = peaks.bound - left
    if plan.reuse == "off" and place.buffer in program.histories[::2]:
        return saved + place.nbytes, "has bytes of its own in this arrangement"
    if saved:
        return saved, f"{step} then peaks at {left:,} B"
    return 0, f"{step} peaks at {left:,} B without it"


@dataclass(frozen=True)
class Role:
    """Buffers that play one part in every layer, in the bill of one rank, in bytes.

    role:      the buffers' common name with ``#`` for numbers
    count:     buffers, and ``nbytes`` their sum
    held:      bytes of the segment that belong to them: less than ``nbytes`` where they share an address
    per_token: bytes of ``held`` that one more context token adds, as a fraction
    worth:     bytes the rank would save without all of them, by the change of the lower bound
    """

    role: str
    kind: str
    formula: str
    count: int
    nbytes: int
    held: int
    per_token: str
    at_peak: bool
    worth: int


def roles(program: Program, plan: Plan) -> tuple[Role, ...]:
    """The bill by role, largest ``held`` first: what a person reads of a whole model."""
    peaks = _Peaks(Lifetimes(program))
    found: dict[tuple[str, str], list[str]] = {}
    for place in plan.places:
        found.setdefault((role_of(place.buffer), place.kind), []).append(place.buffer)
    rows = []
    for (role, kind), names in found.items():
        buffers = [program.by_name[name] for name in names]
        addresses: dict[int, Buffer] = {}
        for buffer in sorted(buffers, key=lambda b: b.nbytes):
            addresses[plan.by_name[buffer.name].offset] = buffer
        held = _covered([plan.by_name[name] for name in names])
        total = sum(b.nbytes for b in buffers)
        rows.append(
            Role(
                role=role,
                kind=kind,
                formula=buffers[0].formula,
                count=len(names),
                nbytes=total,
                held=held,
                per_token=str(sum((slope(b, program.limits) for b in addresses.values()), Fraction(0))),
                at_peak=any(set(names) & top for top, _ in peaks.tops[:1]),
                worth=total if kind != "reusable" else peaks.bound - peaks.without(frozenset(names))[0],
            )
        )
    return tuple(sorted(rows, key=lambda r: (-r.held, r.kind, r.role)))


def _covered(places: list[Place]) -> int:
    """Bytes that belong to at least one place."""
    covered, end = 0, 0
    for place in sorted(places, key=lambda p: p.offset):
        covered += max(0, place.stop - max(end, place.offset))
        end = max(end, place.stop)
    return covered


def _total(plan: Plan, kind: str, granularity: int) -> Total:
    segment = plan.by_kind[kind]
    inside = [p for p in plan.places if p.kind == kind]
    slots, covered = sum(p.nbytes for p in inside), _covered(inside)
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
