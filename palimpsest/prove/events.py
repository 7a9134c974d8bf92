"""Gate S7, the event log: what each rank did in which order, as its own transport saw it, and what that order proves.

Every rank logs the begin and end of its steps and every exchange, barrier and agreement the layer makes; the qualifier's own
meetings are not in it. From the logs of all ranks vector clocks are computed afterwards: the n-th parcel from one rank to
another is the n-th that it sent, and a meeting joins all. Then, for each pair of buffers that share bytes, the last access of
the early one happens before the first of the late one: for the two histories on every rank before every rank (the barrier
between them is global), for other pairs on the rank itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palimpsest.core.spec import Program, Step
from palimpsest.kernels.call import Call, Chunk
from palimpsest.plan.plan import Plan
from palimpsest.prove.gates import Sheet
from palimpsest.ranks.comm import Comm, group_by_peer
from palimpsest.run.arena import Arena
from palimpsest.run.execute import Hooks

if TYPE_CHECKING:
    import torch

#: [kind, phase, name, ...]: begin, end, exchange (peers sent to, peers received from), meet, generations of the signals
Event = list[Any]
BEGIN, END, EXCHANGE, MEET, SIGNALS = "begin", "end", "exchange", "meet", "signals"


class LoggedComm:
    """A Comm that logs what passes through it and changes nothing. ``take`` returns the events since the last call."""

    def __init__(self, comm: Comm):
        self.inner, self.rank, self.size = comm, comm.rank, comm.size
        self.phase = "start"
        self._events: list[Event] = []

    def note(self, kind: str, name: str, *more: Any) -> None:
        self._events.append([kind, self.phase, name, *more])

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def exchange(
        self, sends: Sequence[tuple[int, "torch.Tensor"]], receives: Sequence[tuple[int, "torch.Tensor"]], label: str
    ) -> None:
        peers = [sorted(group_by_peer(self.rank, self.size, messages)) for messages in (sends, receives)]
        self.inner.exchange(sends, receives, label)
        self.note(EXCHANGE, label, *peers)

    def barrier(self, label: str) -> None:
        self.inner.barrier(label)
        self.note(MEET, f"barrier {label}")

    def agree(self, label: str, text: str) -> None:
        self.inner.agree(label, text)
        self.note(MEET, f"agree {label}")

    def enter(self, phase: str) -> None:
        self.inner.enter(phase)
        self.phase = phase


class Logged:
    """Hooks around other hooks: notes when a step begins and ends, and the signals around a step that all ranks must reach."""

    def __init__(self, hooks: Hooks, comm: LoggedComm, arena: Arena):
        self.hooks, self.comm, self.arena = hooks, comm, arena

    def before(self, step: Step, call: Call, chunk: Chunk) -> None:
        self.hooks.before(step, call, chunk)
        self._signals(step)
        self.comm.note(BEGIN, step.name)

    def after(self, step: Step, call: Call, chunk: Chunk) -> None:
        self.comm.note(END, step.name)
        self._signals(step)
        self.hooks.after(step, call, chunk)

    def tap(self, step: Step, event: str, **data: Any) -> None:
        self.hooks.tap(step, event, **data)

    def _signals(self, step: Step) -> None:
        if step.scope == "all":
            for name in _signal_buffers(step, self.arena):
                self.comm.note(SIGNALS, step.name, [int(v) for v in self.arena.view(name).view(-1).tolist()])


def _signal_buffers(step: Step, arena: Arena) -> list[str]:
    return [name for _, name in step.accesses() if arena.plan.by_name[name].kind == "signal"]


@dataclass(frozen=True)
class Pair:
    """Two buffers that share bytes, the early one first; ``everywhere``: ordered across all ranks, not on one alone."""

    early: str
    late: str
    everywhere: bool


@dataclass(frozen=True)
class Schedule:
    """The order a plan relies on: its pairs, who touches what, and the steps that all ranks must reach."""

    pairs: tuple[Pair, ...]
    touches: dict[str, frozenset[str]]
    meetings: tuple[str, ...]

    @staticmethod
    def of(program: Program, plan: Plan) -> "Schedule":
        histories = frozenset(program.histories)
        pairs = tuple(Pair(o.early, o.late, frozenset((o.early, o.late)) == histories) for o in plan.overlaps)
        touches = {step.name: frozenset(name for _, name in step.accesses()) for step in program.steps}
        return Schedule(pairs, touches, tuple(s.name for s in program.steps if s.scope == "all"))

    def units(self, ranks: int) -> int:
        """What one replay on one rank must check."""
        return sum(ranks if pair.everywhere else 1 for pair in self.pairs) + len(self.meetings)


def static(sheet: Sheet, program: Program, schedule: Schedule, arrangement: str) -> None:
    """S7 at the seal: in program order, every access of the early buffer of a pair comes before every access of the late one,
    and a step that all ranks must reach lies between the two histories."""
    order = [step.name for step in program.steps]
    cell = sheet.cell("S7")
    for pair in schedule.pairs:
        early = [i for i, name in enumerate(order) if pair.early in schedule.touches[name]]
        late = [i for i, name in enumerate(order) if pair.late in schedule.touches[name]]
        # what the caller fills before the first step, or reads after the last one, needs no step
        apart = not early or not late or max(early) < min(late)
        guarded = not pair.everywhere or any(max(early) < order.index(name) < min(late) for name in schedule.meetings)
        why = "are not apart in the schedule" if not apart else "are not separated by a step that all ranks must reach"
        cell.check(apart and guarded, 1, f"{arrangement}: {pair.early} and {pair.late} {why}")


class Stuck(Exception):
    """Logs that no execution can have produced."""


def clocks(logs: Sequence[Sequence[Event]]) -> list[list[list[int]]]:
    """The vector clock of every event of every rank: component q is how many of rank q's events happened before it or are it.

    Raises Stuck when a parcel was received and never sent, or a meeting was not attended by all.
    """
    size = len(logs)
    at, own = [0] * size, [[0] * size for _ in range(size)]
    made: list[list[list[int]]] = [[] for _ in range(size)]
    parcels: dict[tuple[int, int], list[list[int]]] = {}
    met: list[dict[int, list[int]]] = []
    counts, sent = [0] * size, [False] * size

    def arrive(rank: int, event: Event) -> bool:
        """Merge what ``event`` waits for into the rank's clock; False when it is not there yet."""
        mine = own[rank]
        if event[0] == EXCHANGE:
            if not sent[rank]:
                for peer in event[3]:
                    parcels.setdefault((rank, peer), []).append(list(mine))
                sent[rank] = True
            if not all(parcels.get((peer, rank)) for peer in event[4]):
                return False
            for peer in event[4]:
                _join(mine, parcels[peer, rank].pop(0))
        elif event[0] == MEET:
            number = counts[rank]
            if number == len(met):
                met.append({})
            met[number].setdefault(rank, list(mine))
            if len(met[number]) < size:
                return False
            for clock in met[number].values():
                _join(mine, clock)
            counts[rank] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank, log in enumerate(logs):
            while at[rank] < len(log) and arrive(rank, log[at[rank]]):
                own[rank][rank] = at[rank] + 1
                made[rank].append(list(own[rank]))
                at[rank] += 1
                sent[rank], moved = False, True
    for rank, log in enumerate(logs):
        if at[rank] < len(log):
            raise Stuck(f"rank {rank} waits for ever in {log[at[rank]][2]}")
    for number, names in enumerate(_meetings(logs)):
        if len(names) > 1:
            raise Stuck(f"meeting {number} is {' and '.join(sorted(names))}")
    return made


def _join(into: list[int], other: list[int]) -> None:
    for i, value in enumerate(other):
        into[i] = max(into[i], value)


def _meetings(logs: Sequence[Sequence[Event]]) -> Iterable[set[str]]:
    names = [[event[2] for event in log if event[0] == MEET] for log in logs]
    return (set(found) for found in zip(*names, strict=True))


def dynamic(sheet: Sheet, schedule: Schedule, logs: Sequence[Sequence[Event]], rank: int, where: str) -> None:
    """S7 of one replay on this rank, from the logs of all ranks."""
    cell = sheet.cell("S7")
    try:
        made = clocks(logs)
    except Stuck as error:
        cell.fail(schedule.units(len(logs)), f"{where}: {error}")
        return
    for pair in schedule.pairs:
        first = _edge(logs[rank], BEGIN, pair.late, schedule)
        for other in range(len(logs)) if pair.everywhere else (rank,):
            last = _edge(logs[other], END, pair.early, schedule)
            before = first is None or last is None or made[rank][first][other] > last
            text = f"{where}: {pair.early} on rank {other} is not done before rank {rank} starts on {pair.late}"
            cell.check(before, 1, text)
    for name in schedule.meetings:
        fault = _meeting_fault(logs[rank], name)
        cell.check(not fault, 1, f"{where}: {fault}")


def _edge(log: Sequence[Event], kind: str, buffer: str, schedule: Schedule) -> int | None:
    """Index of the first begin, or of the last end, of a step that touches ``buffer``."""
    found = [i for i, event in enumerate(log) if event[0] == kind and buffer in schedule.touches.get(event[2], ())]
    return None if not found else found[0] if kind == BEGIN else found[-1]


def _meeting_fault(log: Sequence[Event], step: str) -> str:
    """Empty when the rank met the others exactly once inside ``step`` and its signals advanced by one generation."""
    try:
        begin, end = (next(i for i, event in enumerate(log) if event[0] == kind and event[2] == step) for kind in (BEGIN, END))
    except StopIteration:
        return f"step {step} did not run"
    met = [event for event in log[begin:end] if event[0] == MEET]
    if len(met) != 1:
        return f"step {step} met the other ranks {len(met)} times, once is wanted"
    readings = [event[3] for event in log if event[0] == SIGNALS and event[2] == step]
    if len(readings) != 2 or readings[1] != [value + 1 for value in readings[0]]:
        return f"the signals of step {step} went from {readings[:1]} to {readings[1:]}, one generation up is wanted"
    return ""
