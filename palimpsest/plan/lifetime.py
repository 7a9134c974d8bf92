"""When each buffer is alive, derived from the order of the steps. Nobody types a lifetime.

Happens-before has three sources: steps of one queue run in order, ``after`` names an event of another queue, and the
caller's inputs and outputs lie before the first and after the last step. A step with scope ``all`` orders ranks, not
the queues of one rank: events do that.

A buffer may be alive several times. A step that only writes it kills what was there, so the bytes are free between the
last access before such a write and the write itself.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from palimpsest.core.errors import PlanRefused
from palimpsest.core.spec import Program
from palimpsest.core.units import align_up

#: position of the caller's writes to inputs, before every step
START = -1


class Order:
    """Happens-before over step positions 0..n-1, with START before all of them and ``end`` = n after all of them."""

    def __init__(self, program: Program):
        self.end = len(program.steps)
        self.one_queue = len({step.queue for step in program.steps}) <= 1
        at = {step.name: i for i, step in enumerate(program.steps)}
        latest: dict[str, int] = {}
        self._ancestors: list[int] = []
        for i, step in enumerate(program.steps):
            sources = [at[name] for name in step.after]
            if step.queue in latest:
                sources.append(latest[step.queue])
            mask = 0
            for source in sources:
                mask |= self._ancestors[source] | 1 << source
            self._ancestors.append(mask)
            latest[step.queue] = i

    def precedes(self, a: int, b: int) -> bool:
        """Whether ``a`` is finished before ``b`` begins, in every schedule."""
        if self.one_queue or a == START or b == self.end:
            return a < b
        if b == START or a == self.end:
            return False
        return bool(self._ancestors[b] >> a & 1)


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
        touched = _touched(program, self.order.end)
        if not self.order.one_queue:
            for name, access in touched.items():
                self._refuse_race(name, access)
        self.ranges: dict[str, tuple[LiveRange, ...]] = {}
        for name in self.names:
            if not touched[name]:
                raise PlanRefused(f"program {program.name}: reusable buffer {name} is declared but no step touches it; remove it")
            self._refuse_undefined(name, touched[name])
            self.ranges[name] = self._split(touched[name])

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
        pair = set(self.program.histories) == {a, b} and self.program.limits.ranks > 1
        for one in self.ranges[a]:
            for two in self.ranges[b]:
                if self._before(one, two):
                    first, second = one, two
                elif self._before(two, one):
                    first, second = two, one
                else:
                    return False
                if pair and not self._barrier_between(first, second):
                    return False
        return True

    def live_at(self, position: int) -> tuple[str, ...]:
        """Reusable buffers that hold bytes somebody needs while ``position`` runs, in program order."""
        return tuple(name for name in self.names if any(self._spans(life, position) for life in self.ranges[name]))

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
        """``live_at`` of start, every step and end, in this order."""
        return tuple(self.live_at(position) for position in range(START, self.order.end + 1))

    def live_bytes(self, without: str = "") -> list[int]:
        """Sum of live bytes at start, every step and end; ``without`` leaves one buffer out."""
        return [sum(self.slot_bytes(name) for name in names if name != without) for names in self.live]

    @cached_property
    def lower_bound(self) -> int:
        """No placement of the reusable buffers is smaller: the largest sum of bytes alive together."""
        return max(self.live_bytes())

    def _before(self, one: LiveRange, two: LiveRange) -> bool:
        if self.order.one_queue:
            return one.last < two.first
        return all(self.order.precedes(a, b) for a in one.accesses for b in two.accesses)

    def _barrier_between(self, one: LiveRange, two: LiveRange) -> bool:
        precedes = self.order.precedes
        return any(
            step.scope == "all" and all(precedes(a, i) for a in one.accesses) and all(precedes(i, b) for b in two.accesses)
            for i, step in enumerate(self.program.steps)
        )

    def _spans(self, life: LiveRange, position: int) -> bool:
        begun = any(a == position or self.order.precedes(a, position) for a in life.accesses)
        return begun and any(a == position or self.order.precedes(position, a) for a in life.accesses)

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
        positions = sorted(access)
        for k, a in enumerate(positions):
            for b in positions[k + 1 :]:
                if access[a] | access[b] != {"read"} and not self.order.precedes(a, b):
                    raise PlanRefused(
                        f"program {self.program.name}: steps {self.step_name(a)} and {self.step_name(b)} both touch {name}, "
                        f"one of them writes, and nothing orders them; let one wait for the other (after)"
                    )


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
