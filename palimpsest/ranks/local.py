"""N ranks in one process under a seeded scheduler: the deterministic twin of real ranks.

Each rank is a thread, but exactly one runs at a time; control moves only at ``Comm`` calls, and the next rank is drawn by
``random.Random(seed)``. So a seed is an interleaving: the same seed gives the same run, and a race found once can be replayed.
A message moves when both sides have posted it (the strictest reading of the protocol), copied from view to view.
"""

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from palimpsest.core.errors import RankError
from palimpsest.ranks.comm import Comm, group_by_peer
from palimpsest.ranks.failures import START, disagreement, mismatch, parcel, raised

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: ``hooks(rank, call, label)`` runs as the rank makes the call, before the call has any effect, and returns for how many turns to
#: hold the rank back (0: not at all; it moves earlier when nobody else can). It may raise to inject a fault. ``call`` is
#: ``start``, ``exchange``, ``barrier``, ``agree`` or ``enter``.
Hook = Callable[[int, str, str], int]


class _Released(BaseException):
    """Unwinds a rank whose run has already ended elsewhere."""


@dataclass
class _Post:
    """All the messages one rank sends to (or receives from) one peer in one exchange."""

    rank: int
    label: str
    tensors: list["torch.Tensor"]
    done: bool = False

    def sizes(self) -> list[int]:
        return [t.numel() * t.element_size() for t in self.tensors]

    def __str__(self) -> str:
        return parcel("exchange", self.label, self.sizes())


@dataclass
class _Rank:
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    phase: str = START
    held: int = 0
    ready: Callable[[], bool] | None = None
    waits: str = ""
    ended: bool = False


@dataclass
class _Meeting:
    """A barrier or an agreement under way: what each rank that arrived brought."""

    call: str
    label: str
    texts: dict[int, str] = field(default_factory=dict)


class LocalWorld(Generic[T]):
    """One run. ``trace`` lists ``(rank, call, label)`` in the order the calls were made."""

    def __init__(self, size: int, *, seed: int = 0, hooks: Hook | None = None):
        self.size = size
        self.trace: list[tuple[int, str, str]] = []
        self.values: list[T] = []
        self.failure: BaseException | None = None
        self.meeting: _Meeting | None = None
        self._random = random.Random(seed)
        self._hooks = hooks
        self._ranks = [_Rank() for _ in range(size)]
        self._sends: dict[tuple[int, int], deque[_Post]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[_Post]] = defaultdict(deque)
        self._over = threading.Event()
        self._results: dict[int, T] = {}

    def run(self, main: Callable[[Comm], T]) -> list[T]:
        """Run ``main`` on every rank and return the results by rank. Raises RankError; no thread outlives the call."""
        threads = [threading.Thread(target=self._body, args=(rank, main), name=f"rank-{rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        try:
            self._pass_on()
            self._over.wait()
        finally:
            self.end(None)
            for thread in threads:
                thread.join()
        if self.failure is not None:
            raise self.failure
        return [self._results[rank] for rank in range(self.size)]

    def _body(self, rank: int, main: Callable[[Comm], T]) -> None:
        with _Catch(self, rank):
            self._await_turn(rank)
            self.step(rank, "start", "")
            self._results[rank] = main(LocalComm(self, rank))

    def end(self, failure: BaseException | None) -> None:
        """End the run: the first failure stays, and every waiting rank is released."""
        if not self._over.is_set():
            self.failure = failure
            self._over.set()
        for rank in self._ranks:
            rank.baton.release()

    def leave(self, rank: int) -> None:
        """``main`` returned on ``rank``."""
        self._ranks[rank].ended = True
        self._pass_on()

    def phase(self, rank: int) -> str:
        return self._ranks[rank].phase

    def enter(self, rank: int, phase: str) -> None:
        self._ranks[rank].phase = phase
        self.step(rank, "enter", phase)

    def step(self, rank: int, call: str, label: str) -> None:
        """Record the call and let the scheduler choose who goes on."""
        self.trace.append((rank, call, label))
        me = self._ranks[rank]
        me.held = self._hooks(rank, call, label) if self._hooks else 0
        me.ready, me.waits = None, f"before {call} {label!r}"
        self._pass_on()
        self._await_turn(rank)

    def block(self, rank: int, ready: Callable[[], bool], waits: str) -> None:
        """Go on only when ``ready()``."""
        if ready():
            return
        me = self._ranks[rank]
        me.ready, me.waits = ready, waits
        self._pass_on()
        self._await_turn(rank)

    def _await_turn(self, rank: int) -> None:
        if not self._over.is_set():
            self._ranks[rank].baton.acquire()
        if self._over.is_set():
            raise _Released
        self._ranks[rank].ready = None

    def _pass_on(self) -> None:
        """Hand the baton to a rank that can go on; end the run when all ended, or when none can."""
        live = [r for r, state in enumerate(self._ranks) if not state.ended]
        able = [r for r in live if (check := self._ranks[r].ready) is None or check()]
        free = [r for r in able if self._ranks[r].held <= 0] or able
        for r in able:
            self._ranks[r].held -= 1
        if free:
            chosen = self._random.choice(free)
            self._ranks[chosen].held = 0
            self._ranks[chosen].baton.release()
        elif live:
            self.end(self._deadlock(live))
        else:
            self.end(None)

    def _deadlock(self, live: list[int]) -> RankError:
        waits = [f"rank {r} waits in {self._ranks[r].waits}" for r in live]
        ended = [r for r in range(self.size) if r not in live]
        gone = [f"rank{'s' if len(ended) > 1 else ''} {', '.join(map(str, ended))} ended"] if ended else []
        return RankError("deadlock: " + "; ".join(waits + gone), rank=live[0], phase=self.phase(live[0]))

    def post(self, source: int, target: int, mine: _Post, *, sending: bool) -> None:
        """Queue one side of a message; move every message that now has both sides."""
        (self._sends if sending else self._receives)[source, target].append(mine)
        sends, receives = self._sends[source, target], self._receives[source, target]
        while sends and receives:
            sent, expected = sends.popleft(), receives.popleft()
            if sent.label != expected.label or sent.sizes() != expected.sizes():
                raise mismatch(source, target, self.phase(max(source, target)), sent=str(sent), expected=str(expected))
            for from_view, to_view in zip(sent.tensors, expected.tensors, strict=True):
                _copy(from_view, to_view)
            sent.done = expected.done = True

    def meet(self, rank: int, call: str, label: str, text: str) -> None:
        """Wait until every rank is here with the same call and label; then compare the texts."""
        meeting = self.meeting
        if meeting is None:
            meeting = self.meeting = _Meeting(call, label)
        if (meeting.call, meeting.label) != (call, label):
            other = next(iter(meeting.texts))
            raise mismatch(
                other, rank, self.phase(max(rank, other)), sent=f"{meeting.call} {meeting.label!r}", expected=f"{call} {label!r}"
            )
        meeting.texts[rank] = text
        if len(meeting.texts) == self.size:
            self.meeting = None
            for other in range(self.size):
                if meeting.texts[other] != meeting.texts[0]:
                    theirs, reference = meeting.texts[other], meeting.texts[0]
                    raise disagreement(other, self.phase(other), label, theirs=theirs, reference=reference)
        self.block(rank, lambda: len(meeting.texts) == self.size, f"{call} {label!r}")


def _copy(source: "torch.Tensor", target: "torch.Tensor") -> None:
    """Bytes, whatever the dtypes: a message has no dtype on the wire."""
    import torch

    target.reshape(-1).view(torch.uint8).copy_(source.reshape(-1).view(torch.uint8))


class _Catch:
    """Turns whatever a rank's thread raises into the run's failure."""

    def __init__(self, world: LocalWorld, rank: int):
        self._world = world
        self._rank = rank

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            self._world.leave(self._rank)
        elif not isinstance(error, _Released):
            failure = raised(self._rank, self._world.phase(self._rank), error)
            if failure is not error:
                failure.__cause__ = error
            self._world.end(failure)
        return True


class LocalComm:
    """One rank of a LocalWorld; see ``Comm`` for the calls. Never times out: a deadlock is found exactly."""

    def __init__(self, world: LocalWorld, rank: int):
        self._world = world
        self.rank = rank
        self.size = world.size

    def exchange(
        self, sends: Sequence[tuple[int, "torch.Tensor"]], receives: Sequence[tuple[int, "torch.Tensor"]], label: str
    ) -> None:
        world = self._world
        world.step(self.rank, "exchange", label)
        posts: list[tuple[int, _Post]] = []
        for sending, messages in ((True, sends), (False, receives)):
            for peer, tensors in group_by_peer(self.rank, self.size, messages).items():
                post = _Post(self.rank, label, tensors)
                posts.append((peer, post))
                ends = (self.rank, peer) if sending else (peer, self.rank)
                world.post(*ends, post, sending=sending)
        for peer, post in posts:
            world.block(self.rank, lambda post=post: post.done, f"exchange {label!r} with rank {peer}")  # type: ignore[misc]

    def barrier(self, label: str) -> None:
        self._world.step(self.rank, "barrier", label)
        self._world.meet(self.rank, "barrier", label, "")

    def agree(self, label: str, text: str) -> None:
        self._world.step(self.rank, "agree", label)
        self._world.meet(self.rank, "agree", label, text)

    def enter(self, phase: str) -> None:
        self._world.enter(self.rank, phase)


def run_local(size: int, main: Callable[[Comm], T], *, seed: int = 0, hooks: Hook | None = None) -> list[T]:
    """Run ``main(comm)`` on ``size`` in-process ranks and return what each returned.

    Raises RankError naming the rank and phase that raised, disagreed, or blocked for ever. Use ``LocalWorld`` directly for the
    trace.
    """
    return LocalWorld[T](size, seed=seed, hooks=hooks).run(main)
