"""When each buffer is alive, derived from the order of the steps. Nobody types a lifetime.

A buffer may be alive several times. A step that only writes it kills what was there, so the bytes are free between the
last access before such a write and the write itself. Every life begins with one write that precedes all its other
accesses in every schedule: anything else is a race or a read of undefined bytes, and refused.
"""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from palimpsest.core.errors import PlanRefused
from palimpsest.core.spec import Program
from palimpsest.core.units import align_up
from palimpsest.plan.order import START, Order

__all__ = ["START", "Lifetimes", "LiveRange", "Order"]


@dataclass(frozen=True)
class LiveRange:
    """One life of a buffer: the positions that access it, ascending; between them its bytes must be left alone."""

    accesses: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.accesses[0]

    @property
    def last(self) -> int:
        return self.accesses[-1]


class Lifetimes:
    """Live ranges of every reusable buffer of one program.

    Raises PlanRefused for a read of undefined bytes, for a reusable buffer nobody touches, and for two unordered steps
    that touch one buffer when at least one of them writes.
    """

    def __init__(self, program: Program):
        self.program = program
        self.order = Order(program)
        self.names = tuple(b.name for b in program.all_buffers if b.kind == "reusable")
        self.touched = _touched(program, self.order.end)
        if not self.order.one_queue:
            for name, access in self.touched.items():
                self._refuse_race(name, access)
        self.ranges: dict[str, tuple[LiveRange, ...]] = {}
        for name in self.names:
            if not self.touched[name]:
                raise PlanRefused(f"program {program.name}: reusable buffer {name} is declared but no step touches it; remove it")
            self._refuse_undefined(name, self.touched[name])
            self.ranges[name] = self._split(self.touched[name])
        self._clocks = {} if self.order.one_queue else {n: tuple(map(self._clock, lives)) for n, lives in self.ranges.items()}
        self.fences = [i for i, step in enumerate(program.steps) if step.scope == "all"]

    def step_name(self, position: int) -> str:
        """``start``, a step's name, or ``end``."""
        if position == START:
            return "start"
        return "end" if position == self.order.end else self.program.steps[position].name

    def may_share(self, a: str, b: str) -> bool:
        """Whether every access of each life of ``a`` happens before every access of each life of ``b``, or the reverse.

        A declared pair of histories must in addition have a step of scope ``all`` between them when there are several
        ranks: every rank's readers must be done before any rank starts to overwrite.
        """
        return self.clash(a, b) is None

    def clash(self, a: str, b: str) -> tuple[int, int] | None:
        """Two accesses, of ``a`` and of ``b``, that forbid common bytes; None when the two may share."""
        fenced = self.fenced(a, b)
        for i, one in enumerate(self.ranges[a]):
            for j, two in enumerate(self.ranges[b]):
                if self._before(a, i, b, j):
                    if fenced and self.fence_between(one, two) is None:
                        return one.last, two.first
                elif self._before(b, j, a, i):
                    if fenced and self.fence_between(two, one) is None:
                        return one.first, two.last
                else:
                    return self._entangled(one, two)
        return None

    def why(self, a: str, b: str) -> str:
        """What is missing between the two accesses that ``clash`` found, in words."""
        pair = self.clash(a, b)
        if pair is None:
            return "every schedule orders them"
        low, high = sorted(pair)
        if low == high:
            return "one step needs both"
        if self.order.precedes(low, high) and self.fenced(a, b) and self._apart(a, b):
            return f"no step that all {self.program.limits.ranks} ranks must reach lies between them"
        return (
            "the lives of the two interleave"
            if self.order.precedes(low, high)
            else "some schedule runs these two in either order"
        )

    def follows(self, a: str, b: str) -> bool:
        """Whether ``a`` is over for good before ``b`` begins, in every schedule, with no barrier asked for between them."""
        return not self.fenced(a, b) and self._before(a, len(self.ranges[a]) - 1, b, 0)

    def sequence(self, names: Iterable[str]) -> list[tuple[int, str, int]]:
        """The lives of buffers that may all share, in the order they begin: (first access, buffer, number of the life)."""
        return sorted((life.first, name, i) for name in names for i, life in enumerate(self.ranges[name]))

    def chained(self, one: list[tuple[int, str, int]], two: list[tuple[int, str, int]]) -> bool:
        """Whether two sequences, each ordered in itself, are ordered together: neighbours suffice, the order is transitive."""
        merged = sorted(one + two)
        return all(a[1] == b[1] or self._before(a[1], a[2], b[1], b[2]) for a, b in itertools.pairwise(merged))

    def _apart(self, a: str, b: str) -> bool:
        return all(
            self._before(a, i, b, j) or self._before(b, j, a, i)
            for i in range(len(self.ranges[a]))
            for j in range(len(self.ranges[b]))
        )

    def fenced(self, a: str, b: str) -> bool:
        """Whether the two are a declared pair of histories on several ranks."""
        return self.program.limits.ranks > 1 and (self.partner.get(a) == b or self.partner.get(b) == a)

    @cached_property
    def partner(self) -> dict[str, str]:
        """Early history -> late history of every declared pair."""
        return dict(zip(self.program.histories[::2], self.program.histories[1::2], strict=False))

    def fence_between(self, one: LiveRange, two: LiveRange) -> int | None:
        """The first step of scope ``all`` after every access of ``one`` and before every access of ``two``."""
        precedes = self.order.precedes
        for i in self.fences:
            if all(precedes(a, i) for a in one.accesses) and precedes(i, two.first):
                return i
        return None

    def live_at(self, position: int) -> tuple[str, ...]:
        """Reusable buffers that hold bytes somebody needs while ``position`` runs in program order."""
        return self.live[position + 1]

    @cached_property
    def granule(self) -> int:
        """The common divisor of the reusable alignments: no two buffers can share one granule."""
        found = 0
        for name in self.names:
            found = gcd(found, self.program.by_name[name].align)
        return found or 1

    def slot_bytes(self, name: str) -> int:
        """Bytes of a buffer, rounded up to whole granules."""
        return align_up(self.program.by_name[name].nbytes, self.granule)

    @cached_property
    def live(self) -> tuple[tuple[str, ...], ...]:
        """``live_at`` of start, every step and end, in this order: program order is one schedule every plan must survive."""
        opens: list[list[int]] = [[] for _ in range(self.order.end + 3)]
        closes: list[list[int]] = [[] for _ in range(self.order.end + 3)]
        for k, name in enumerate(self.names):
            for life in self.ranges[name]:
                opens[life.first + 1].append(k)
                closes[life.last + 2].append(k)
        alive: list[int] = []
        found: list[tuple[str, ...]] = []
        for position in range(self.order.end + 2):
            for k in closes[position]:
                del alive[bisect_left(alive, k)]
            for k in opens[position]:
                insort(alive, k)
            same = found and not closes[position] and not opens[position]
            found.append(found[-1] if same else tuple(self.names[k] for k in alive))
        return tuple(found)

    def live_bytes(self, without: str = "") -> list[int]:
        """Sum of live bytes at start, every step and end; ``without`` leaves one buffer out."""
        size = {name: self.slot_bytes(name) for name in self.names if name != without}
        return [sum(size.get(name, 0) for name in names) for names in self.live]

    @cached_property
    def lower_bound(self) -> int:
        """No placement of the reusable buffers is smaller: the largest sum of bytes alive together."""
        return max(self.live_bytes())

    def _clock(self, life: LiveRange) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.order.finished(life.first), self.order.reach(life.accesses)

    def _before(self, a: str, i: int, b: str, j: int) -> bool:
        """Whether life ``i`` of ``a`` is over before life ``j`` of ``b`` begins, in every schedule."""
        if self.ranges[a][i].last >= self.ranges[b][j].first:
            return False
        if self.order.one_queue:
            return True
        return all(need <= done for need, done in zip(self._clocks[a][i][1], self._clocks[b][j][0], strict=True))

    def _entangled(self, one: LiveRange, two: LiveRange) -> tuple[int, int]:
        """Two accesses of lives that are ordered neither way."""
        early, late = (one, two) if one.first <= two.first else (two, one)
        after = [a for a in early.accesses if not self.order.precedes(a, late.first)]
        pair = (after[-1], late.first)
        return pair if early is one else (pair[1], pair[0])

    def _split(self, access: dict[int, set[str]]) -> tuple[LiveRange, ...]:
        # a step that only writes is ordered with every other access, or it would have been refused as a race
        positions = sorted(access)
        cuts = [k for k, p in enumerate(positions) if k and access[p] == {"write"}]
        bounds = [0, *cuts, len(positions)]
        return tuple(LiveRange(tuple(positions[lo:hi])) for lo, hi in itertools.pairwise(bounds))

    def _refuse_undefined(self, name: str, access: dict[int, set[str]]) -> None:
        first = min(access)
        if access[first] != {"write"}:
            if first == self.order.end:
                raise PlanRefused(f"program {self.program.name}: output {name} is never written; add the step that writes it")
            raise PlanRefused(
                f"program {self.program.name}: step {self.step_name(first)} reads {name} before any step has written it "
                f"(undefined bytes); write it first, or name it among the program's inputs"
            )

    def _refuse_race(self, name: str, access: dict[int, set[str]]) -> None:
        """Per queue the last access, and the last that writes, must precede the next one: earlier ones then do as well."""
        latest: dict[int, int] = {}
        writers: dict[int, int] = {}
        for b in sorted(access):
            for a in (writers if access[b] == {"read"} else latest).values():
                if not self.order.precedes(a, b):
                    raise PlanRefused(
                        f"program {self.program.name}: steps {self.step_name(a)} and {self.step_name(b)} both touch {name}, "
                        f"one of them writes, and nothing orders them; let one wait for the other (after)"
                    )
            queue = self.order.queue[b] if START < b < self.order.end else -1
            latest[queue] = b
            if access[b] != {"read"}:
                writers[queue] = b


def _touched(program: Program, end: int) -> dict[str, dict[int, set[str]]]:
    """Buffer name -> position -> accesses there; an input is written at START and an output is read at ``end``."""
    touched: dict[str, dict[int, set[str]]] = {b.name: {} for b in program.all_buffers}
    for name in program.inputs:
        touched[name][START] = {"write"}
    for i, step in enumerate(program.steps):
        for access, name in step.accesses():
            touched[name].setdefault(i, set()).add(access)
    for name in program.outputs:
        touched[name][end] = {"read"}
    return touched
