"""Happens-before over the steps of one program, and the chain of links that proves a pair of it.

Three sources: steps of one queue run in order, ``after`` names an event of another queue, and the caller's inputs and
outputs lie before the first and after the last step. A step with scope ``all`` orders ranks, not the queues of one rank:
events do that.
"""

from bisect import bisect_right

from palimpsest.core.spec import Program

#: position of the caller's writes to inputs, before every step
START = -1


class Order:
    """Happens-before over step positions 0..n-1, with START before all of them and ``end`` = n after all of them.

    Program order is one allowed schedule, so ``a`` can only precede ``b`` when ``a < b``. With several queues every step
    has a vector clock: how many steps of each queue are finished once it is.
    """

    def __init__(self, program: Program):
        self.end = len(program.steps)
        self.queues = tuple(dict.fromkeys(step.queue for step in program.steps))
        self.one_queue = len(self.queues) <= 1
        self.after = [step.after for step in program.steps]
        self.at = {step.name: i for i, step in enumerate(program.steps)}
        number = {name: k for k, name in enumerate(self.queues)}
        self.queue = [number[step.queue] for step in program.steps]
        self.count: list[int] = []
        self.clocks: list[tuple[int, ...]] = []
        if not self.one_queue:
            self._tick()
        self._waits: list[list[int]] = [[] for _ in self.queues]
        for i, names in enumerate(self.after):
            if names:
                self._waits[self.queue[i]].append(i)

    def _tick(self) -> None:
        zero = (0,) * len(self.queues)
        latest = [zero] * len(self.queues)
        for i, q in enumerate(self.queue):
            clock = latest[q]
            for name in self.after[i]:
                clock = tuple(map(max, clock, self.clocks[self.at[name]]))
            clock = (*clock[:q], latest[q][q] + 1, *clock[q + 1 :])
            self.count.append(clock[q])
            self.clocks.append(clock)
            latest[q] = clock

    def precedes(self, a: int, b: int) -> bool:
        """Whether ``a`` is finished before ``b`` begins, in every schedule."""
        if self.one_queue or a == START or b == self.end:
            return a < b
        if b == START or a == self.end or a >= b:
            return False
        return self.clocks[b][self.queue[a]] >= self.count[a]

    def reach(self, accesses: tuple[int, ...]) -> tuple[int, ...]:
        """Per queue, how many of its steps must be finished before all of ``accesses`` are; ``end`` is never finished."""
        done = [0] * len(self.queues)
        for a in accesses:
            if a == self.end:
                return (self.end + 1,) * len(self.queues)
            if a != START:
                done[self.queue[a]] = max(done[self.queue[a]], self.count[a])
        return tuple(done)

    def finished(self, position: int) -> tuple[int, ...]:
        """Per queue, how many of its steps are finished before ``position`` begins."""
        if position == START:
            return (-1,) * len(self.queues)
        if position == self.end:
            return (self.end,) * len(self.queues)
        q = self.queue[position]
        clock = self.clocks[position]
        return (*clock[:q], clock[q] - 1, *clock[q + 1 :])

    def chain(self, a: int, b: int) -> tuple[int, ...]:
        """Positions from ``a`` to ``b``, each link a later step of the same queue or a step that waits for the one before.

        ``a`` must precede ``b``. The nearest wait behind ``b`` that leads back to ``a`` is taken, so chains stay short.
        """
        if self.one_queue or a == START or b == self.end or self.queue[a] == self.queue[b]:
            return (a, b)
        waits = self._waits[self.queue[b]]
        for k in range(bisect_right(waits, b) - 1, -1, -1):
            for name in self.after[waits[k]]:
                source = self.at[name]
                if source == a or self.precedes(a, source):
                    head = (a,) if source == a else self.chain(a, source)
                    return (*head, waits[k]) if waits[k] == b else (*head, waits[k], b)
        raise AssertionError(f"steps {a} and {b} are not ordered")
