"""Inverse planning: the largest context or rows, or the fewest ranks, that a byte budget holds; what binds; what cannot fit.

A candidate is first judged by its lower bound (no placement is smaller), which needs no placement; the answer is then placed, so
"fits" is a plan and "does not fit" is a set of bytes that must exist at one time. Sizes are expected to grow with what is asked
for; every pair of candidates looked at is compared, and a shrinking one is said in the answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from palimpsest.core.errors import BadConfig, CapacityError, Unsupported
from palimpsest.core.spec import KINDS, Limits, Program
from palimpsest.core.units import Pages, Ranks, Rows, Tokens, align_up
from palimpsest.plan.account import CUDA_GRANULARITY, Role, roles
from palimpsest.plan.lifetime import START, Lifetimes
from palimpsest.plan.place import place
from palimpsest.plan.plan import Plan

GIB = 1 << 30
#: rank counts tried when the fewest are asked for
RANKS = tuple(1 << i for i in range(11))
#: no context is longer: token ids are int32
LONGEST = 1 << 31

Build = Callable[[Limits], Program]


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank.

    memory:      what the device has, and ``reserve`` of it is for things no plan knows (driver context, libraries)
    granularity: what the allocator maps at once; segments are counted in whole granules
    """

    memory: int
    reserve: int = 0
    granularity: int = CUDA_GRANULARITY

    def __post_init__(self) -> None:
        if self.granularity < 1 or self.granularity & (self.granularity - 1):
            raise BadConfig(f"granularity is {self.granularity} bytes; a power of two is wanted, such as 4KiB or 2MiB")
        if not 0 <= self.reserve < self.memory:
            raise BadConfig(
                f"reserve is {self.reserve:,} bytes of a memory of {self.memory:,}; it must leave something to plan with"
            )

    @property
    def usable(self) -> int:
        return self.memory - self.reserve

    def mapped(self, segments: dict[str, int]) -> int:
        """Bytes of segments in whole granules."""
        return sum(align_up(nbytes, self.granularity) for nbytes in segments.values())


@dataclass(frozen=True)
class Growth:
    """Bytes that one more of what was asked for (token, row) adds to the buffers of one role, as a fraction."""

    role: str
    kind: str
    each: str


@dataclass(frozen=True)
class Fit:
    """The answer, per rank.

    asked:    ``context``, ``rows`` or ``ranks``; ``limits`` holds the answer, or the smallest candidate when nothing fits
    mapped, logical, peak, lower_bound: bytes of the plan of ``limits``
    grows:    what one more token or row adds, most first; the first is the binding slot
    slots:    the bill by role, largest first
    next_gib: what one more GiB would allow instead of the answer (0 when it was not asked)
    capped:   why the answer is not larger when memory is not the reason
    cannot:   the fewest buffers that must exist together and exceed the budget, largest first, with their bytes
    """

    asked: str
    fits: bool
    limits: Limits
    budget: Budget
    mapped: int
    logical: int
    peak: int
    lower_bound: int
    peak_step: str
    placer: str
    digest: str
    grows: tuple[Growth, ...]
    slots: tuple[Role, ...]
    next_gib: int = 0
    capped: str = ""
    cannot: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def spare(self) -> int:
        """Usable bytes left over; negative when it does not fit."""
        return self.budget.usable - self.mapped

    @property
    def binding(self) -> str:
        """The role that grows most, or the largest one when nothing grows."""
        return self.grows[0].role if self.grows else self.slots[0].role


def largest_context(build: Build, budget: Budget, *, rows: int, ranks: int, page: int = 64, least: int = 1) -> Fit:
    """The largest context, a multiple of ``page``, whose plan fits. ``least``: tokens a context must have, such as the top-k."""
    low = -(-max(rows, least) // page)
    search = _Search(build, budget, lambda k: Limits(Pages(k).tokens(page), Rows(rows), Ranks(ranks), page))
    best = search.largest(low, LONGEST // page)
    if best is None:
        return search.misfit("context", low)
    beyond = _Search(build, Budget(budget.memory + GIB, budget.reserve, budget.granularity), search.limits, search)
    more = beyond.largest(best, LONGEST // page) or best
    capped = f"token ids are int32: no context is longer than {LONGEST:,}" if best == LONGEST // page else ""
    return search.answer("context", best, min(best + ranks, LONGEST // page), Fraction(page), next_gib=more * page, capped=capped)


def largest_rows(build: Build, budget: Budget, *, tokens: int, ranks: int, page: int = 64) -> Fit:
    """The most query rows of one chunk whose plan fits with a context of ``tokens``."""
    search = _Search(build, budget, lambda k: Limits(Tokens(tokens), Rows(k), Ranks(ranks), page))
    best = search.largest(1, tokens)
    if best is None:
        return search.misfit("rows", 1)
    beyond = _Search(build, Budget(budget.memory + GIB, budget.reserve, budget.granularity), search.limits, search)
    more = beyond.largest(best, tokens) or best
    capped = f"a chunk has at most as many rows as the context of {tokens:,} tokens" if best == tokens else ""
    return search.answer("rows", best, min(best + ranks, tokens), Fraction(1), next_gib=more, capped=capped)


def fewest_ranks(
    build: Build, budget: Budget, *, tokens: int, rows: int, page: int = 64, choices: tuple[int, ...] = RANKS
) -> Fit:
    """The fewest ranks of ``choices`` whose plan fits; counts the model refuses are skipped. Raises Unsupported for none."""
    search = _Search(build, budget, lambda k: Limits(Tokens(tokens), Rows(rows), Ranks(k), page))
    allowed = []
    for ranks in sorted(choices):
        try:
            search.program(ranks)
        except Unsupported as error:
            refusal = error
            continue
        allowed.append(ranks)
        if search.bound(ranks) <= budget.usable and search.exact(ranks) <= budget.usable:
            return search.answer("ranks", ranks, ranks, Fraction(1))
    if not allowed:
        raise refusal
    return search.misfit("ranks", allowed[-1])


def fits(build: Build, budget: Budget, limits: Limits) -> Fit:
    """Whether one set of limits fits, with the same answer as a search."""
    search = _Search(build, budget, lambda k: limits)
    if search.bound(0) > budget.usable or search.exact(0) > budget.usable:
        return search.misfit("context", 0)
    return search.answer("context", 0, 0, Fraction(1))


class _Search:
    """Candidates by number; each is built, bounded and placed at most once."""

    def __init__(self, build: Build, budget: Budget, limits: Callable[[int], Limits], known: "_Search | None" = None):
        self.build, self.budget, self.limits = build, budget, limits
        self.bounds: dict[int, int] = known.bounds if known else {}
        self.plans: dict[int, Plan] = known.plans if known else {}
        self.notes: list[str] = []

    def program(self, k: int) -> Program:
        return self.build(self.limits(k))

    def bound(self, k: int) -> int:
        """Mapped bytes below which no plan of candidate ``k`` lies."""
        if k not in self.bounds:
            program = self.program(k)
            segments = _stacked(program)
            if any(b.kind == "reusable" for b in program.all_buffers):
                segments["reusable"] = Lifetimes(program).lower_bound
            self.bounds[k] = self.budget.mapped(segments)
        return self.bounds[k]

    def exact(self, k: int) -> int:
        """Mapped bytes of the plan of candidate ``k``."""
        if k not in self.plans:
            self.plans[k] = place(self.program(k))
        return self.budget.mapped({segment.kind: segment.nbytes for segment in self.plans[k].segments})

    def largest(self, low: int, high: int) -> int | None:
        """The largest candidate of [low, high] whose plan fits, None when not even ``low`` does."""
        best = self._last(self.bound, low, high)
        if best is None or self.exact(best) <= self.budget.usable:
            return best
        self.notes.append(f"the bound would allow {self.limits(best)}, for which no placement that small was found")
        return self._last(self.exact, low, best)

    def _last(self, need: Callable[[int], int], low: int, high: int) -> int | None:
        """The last candidate that needs no more than the budget: bracket and interpolate, exact for growing sizes."""
        usable = self.budget.usable
        a, b = low, high
        need_a = need(a)
        if need_a > usable:
            return None
        need_b = need(b)
        if need_b <= usable:
            return b
        seen, halve = {a: need_a, b: need_b}, False
        while b - a > 1:
            guess = (a + b) // 2 if halve else a + (usable - need_a) * (b - a) // (need_b - need_a)
            middle = min(max(guess, a + 1), b - 1)
            width, found = b - a, need(middle)
            seen[middle] = found
            if found <= usable:
                a, need_a = middle, found
                if guess == middle and not halve and b - a > 1:
                    seen[a + 1] = need(a + 1)
                    if seen[a + 1] > usable:
                        b, need_b = a + 1, seen[a + 1]
                    else:
                        a, need_a = a + 1, seen[a + 1]
            else:
                b, need_b = middle, found
            halve = b - a > width // 2
        self._remark(seen)
        return a

    def _remark(self, seen: dict[int, int]) -> None:
        ordered = sorted(seen)
        for one, two in pairwise(ordered):
            if seen[two] < seen[one]:
                small, large = ({b.name: b.nbytes for b in self.program(k).all_buffers} for k in (one, two))
                name = max(small, key=lambda n: small[n] - large.get(n, 0))
                self.notes.append(
                    f"sizes are not monotone: {self.limits(one)} needs {seen[one]:,} bytes and {self.limits(two)} only "
                    f"{seen[two]:,} ({name} shrinks from {small[name]:,} to {large.get(name, 0):,}); the answer fits, "
                    f"but a larger one may as well"
                )

    def answer(self, asked: str, k: int, other: int, unit: Fraction, *, next_gib: int = 0, capped: str = "") -> Fit:
        mapped, plan, program = self.exact(k), self.plans[k], self.program(k)
        bill = roles(program, plan)
        grows: tuple[Growth, ...] = ()
        if other > k:
            self.exact(other)
            after = {(r.role, r.kind): r for r in roles(self.program(other), self.plans[other])}
            grows = _grows(bill, after, (other - k) * unit)
        return self._fit(asked, k, program, (mapped, plan), bill=bill, grows=grows, next_gib=next_gib, capped=capped)

    def misfit(self, asked: str, k: int) -> Fit:
        mapped, program = self.exact(k), self.program(k)
        plan = self.plans[k]
        cannot = cannot_fit(program, self.budget.usable)
        if not cannot:
            self.notes.append("the buffers alone would fit, but not in whole granules and with the best placement found")
        return self._fit(asked, k, program, (mapped, plan), bill=roles(program, plan), cannot=cannot)

    def _fit(
        self, asked: str, k: int, program: Program, made: tuple[int, Plan], *, bill: tuple[Role, ...],
        grows: tuple[Growth, ...] = (), next_gib: int = 0, capped: str = "", cannot: tuple[tuple[str, int], ...] = (),
    ) -> Fit:  # fmt: skip
        (mapped, plan), lifetimes = made, Lifetimes(program)
        live = lifetimes.live_bytes()
        return Fit(
            asked=asked,
            fits=mapped <= self.budget.usable,
            limits=self.limits(k),
            budget=self.budget,
            mapped=mapped,
            logical=plan.total,
            peak=plan.peak,
            lower_bound=plan.lower_bound,
            peak_step=lifetimes.step_name(live.index(max(live)) + START),
            placer=plan.placer,
            digest=plan.digest,
            grows=grows,
            slots=bill,
            next_gib=next_gib,
            capped=capped,
            cannot=cannot,
            notes=tuple(self.notes),
        )


def cannot_fit(program: Program, usable: int) -> tuple[tuple[str, int], ...]:
    """The fewest buffers that must exist together and exceed ``usable`` bytes, largest first; empty when there are none.

    Irreducible: without any one of them the rest no longer exceeds the budget. They are taken from what exists at the step of the
    largest live sum: everything that shares no bytes, and what is alive there.
    """
    lifetimes = Lifetimes(program)
    live = lifetimes.live_bytes()
    alive = lifetimes.live[live.index(max(live))] if lifetimes.names else ()
    together = [b for b in program.all_buffers if b.kind != "reusable" or b.name in set(alive)]
    found, total = [], 0
    for buffer in sorted(together, key=lambda b: (-b.nbytes, b.name)):
        found.append((buffer.name, buffer.nbytes))
        total += buffer.nbytes
        if total > usable:
            return tuple(found)
    return ()


def refuse(fit: Fit, what: str) -> CapacityError:
    """The error for callers that need an answer and not a report."""
    names = ", ".join(name for name, _ in fit.cannot[:4])
    return CapacityError(
        f"{what} does not fit: {fit.limits} needs {fit.mapped:,} bytes per rank and {fit.budget.usable:,} are usable; "
        f"{len(fit.cannot)} buffers alone exceed that ({names}, ...); use more ranks, fewer rows or a shorter context"
    )


def _grows(before: tuple[Role, ...], after: dict[tuple[str, str], Role], by: Fraction) -> tuple[Growth, ...]:
    """What each role gained, most first; roles that share bytes count only where they are alive at the peak."""
    found = []
    for role in before:
        gained = after[role.role, role.kind].held - role.held if (role.role, role.kind) in after else 0
        if gained > 0 and (role.kind != "reusable" or role.at_peak):
            found.append((Fraction(gained) / by, role))
    return tuple(Growth(role.role, role.kind, str(each)) for each, role in sorted(found, key=lambda f: (-f[0], f[1].role)))


def _stacked(program: Program) -> dict[str, int]:
    """Size of every segment whose buffers share nothing."""
    sizes: dict[str, int] = {}
    for kind in KINDS:
        for buffer in program.all_buffers:
            if buffer.kind == kind != "reusable":
                sizes[kind] = align_up(sizes.get(kind, 0), buffer.align) + buffer.nbytes
    return sizes
