"""Prepare a plan once, then walk its steps for every chunk: the interpreter.

``prepare`` checks the plan independently, maps the arenas, fills weights and tables, binds every step to its views, tries the arithmetic and replays
the largest case once; then it seals. A sealed session allocates nothing, and refuses a request above its capacity before any byte is touched.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from palimpsest.core.errors import BadConfig, CapacityError, UserError
from palimpsest.core.spec import Program, Step
from palimpsest.kernels.call import TORCH_DTYPES, Call, Chunk, Implementation, no_tap
from palimpsest.plan.check import check
from palimpsest.plan.plan import Plan
from palimpsest.ranks.comm import Comm
from palimpsest.run.arena import Arena
from palimpsest.run.bind import Bound, bind, default_implementations
from palimpsest.run.guards import SealGuard
from palimpsest.run.meters import Counters, counters
from palimpsest.run.weights import Filler


class Hooks(Protocol):
    """Watches a replay from outside: called around every step, and at the events an implementation names. Must not change a byte it reads."""

    def before(self, step: Step, call: Call, chunk: Chunk) -> None: ...
    def after(self, step: Step, call: Call, chunk: Chunk) -> None: ...
    def tap(self, step: Step, event: str, **data: Any) -> None: ...


class Session:
    """A prepared layer on one rank. Made by ``prepare``.

    arena:   the planned memory; ``arena.view`` reads any buffer, and fills the caches of a history
    at_seal: counters when it was sealed, for the allocation gate
    """

    def __init__(self, program: Program, plan: Plan, arena: Arena, comm: Comm, bound: tuple[Bound, ...]):
        self.program, self.plan, self.arena, self.comm, self.bound = program, plan, arena, comm, bound
        self.at_seal: Counters | None = None
        self.output = arena.view(program.outputs[0])
        self.guard = SealGuard(arena)

    @property
    def sealed(self) -> bool:
        return self.at_seal is not None

    def seal(self) -> None:
        """From here on nothing is allocated; every rank seals together."""
        self.comm.agree("sealed", self.plan.digest)
        with self.guard:  # torch sets its dispatch mode up at first use
            self.output[:0].zero_()
        self.at_seal = counters(self.arena)

    def prefill(
        self,
        hidden: torch.Tensor,
        history: int,
        *,
        rows: int | None = None,
        ids: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        hooks: Hooks | None = None,
        guard: bool = False,
        copy: bool = False,
    ) -> torch.Tensor:
        """Append ``rows`` tokens after ``history`` cached ones and return their output, [rows, hidden], in the activation dtype.

        hidden:      normed hidden rows, [>= rows, hidden], activation dtype or fp32; ``rows`` defaults to all of them, 0 is fine
        ids, counts: int32 [rows, topk] and [rows], for a shared layer only: what the full layer before it selected
        guard:       raise HiddenAllocation when a step's torch operations allocate (slower; for qualification)
        copy:        return a private copy. Otherwise the result is a view of the plan: valid until the next call or ``close``
        Collective: every rank passes the same chunk. Raises CapacityError (more than was prepared) and UserError (wrong shape or dtype)
        before any byte is touched, and RankError.
        """
        if self.arena.closed:
            raise UserError("this session is closed; prepare a new one")
        chunk = self._checked(hidden, history, hidden.shape[0] if rows is None else rows)
        selected = self._checked_selection(ids, counts, chunk)
        self.comm.enter("request")
        self.comm.agree("chunk", f"history {chunk.history}, rows {chunk.rows}")
        with torch.no_grad():
            self._put_selection(selected, chunk)
            for bound in self.bound:
                self._step(bound, chunk, hooks, self.guard if guard else nullcontext())
            result = self.output[: chunk.rows]
            return result.clone() if copy else result

    def _step(self, bound: Bound, chunk: Chunk, hooks: Hooks | None, guard: AbstractContextManager[Any]) -> None:
        step, call = bound.step, bound.call
        self.comm.enter(step.phase)
        call.scratch.reset()
        if hooks is not None:
            hooks.before(step, call, chunk)
            call.tap = _tap(hooks, step)
        try:
            with guard:
                bound.run(call, chunk)
        finally:
            call.tap = no_tap
        if hooks is not None:
            hooks.after(step, call, chunk)

    def _checked(self, hidden: torch.Tensor, history: int, rows: int) -> Chunk:
        limits, name = self.program.limits, self.program.name
        for what, value in (("history", history), ("rows", rows)):
            if type(value) is not int or value < 0:
                raise CapacityError(f"{name}: {what} = {value!r}; a whole number from 0 on is wanted")
        if rows > limits.rows:
            raise CapacityError(f"{name}: {rows} rows in one chunk, {limits.rows} are prepared; send chunks of at most {limits.rows} rows")
        if history + rows > limits.tokens:
            raise CapacityError(
                f"{name}: history {history} and {rows} rows make {history + rows} tokens, {limits.tokens} are prepared; "
                f"at most {max(0, limits.tokens - history)} rows still fit, or prepare a longer context"
            )
        plane = self.program.by_name["hidden"].planes[0]
        dtypes = {TORCH_DTYPES[plane.dtype], torch.float32}
        if hidden.dim() != 2 or hidden.shape[1] != plane.shape[1] or hidden.shape[0] < rows:
            raise UserError(f"{name}: hidden has shape {list(hidden.shape)}; [{rows}, {plane.shape[1]}] is wanted")
        if hidden.dtype not in dtypes or hidden.device.type != "cpu":
            raise UserError(f"{name}: hidden is {hidden.dtype} on {hidden.device}; {plane.dtype} or fp32 on the CPU is wanted")
        return Chunk(history, rows, hidden[:rows])

    def _checked_selection(self, ids: torch.Tensor | None, counts: torch.Tensor | None, chunk: Chunk) -> dict[str, torch.Tensor]:
        """A shared layer's inputs, in range: an id is a visible token or the pad value -1."""
        given = {"ids": ids, "counts": counts}
        wanted, name = self.program.inputs, self.program.name
        if {k for k, v in given.items() if v is not None} != set(wanted):
            raise UserError(f"{name}: takes {list(wanted) or 'no selection'}; given {[k for k, v in given.items() if v is not None]}")
        found = {}
        for what in wanted:
            tensor = given[what]
            assert tensor is not None
            plane = self.program.by_name[what].planes[0]
            shape = (chunk.rows, *plane.shape[1:])
            if tuple(tensor.shape) != shape or tensor.dtype != torch.int32:
                raise UserError(f"{name}: {what} is {list(tensor.shape)} {tensor.dtype}; {list(shape)} torch.int32 is wanted")
            found[what] = tensor
        if found and chunk.rows:
            visible = torch.arange(chunk.history + 1, chunk.visible + 1).unsqueeze(1)
            bad = ((found["ids"] < -1) | (found["ids"] >= visible)).any(1) | (found["counts"] < 0) | (found["counts"] > found["ids"].shape[1])
            if bool(bad.any()):
                row = int(bad.nonzero()[0])
                raise UserError(f"{name}: row {row} selects a token it cannot see, or counts {int(found['counts'][row])} of {found['ids'].shape[1]} ids")
        return found

    def _put_selection(self, selected: Mapping[str, torch.Tensor], chunk: Chunk) -> None:
        for what, tensor in selected.items():
            view = self.arena.view(what)
            view[: chunk.rows].copy_(tensor)
            view[chunk.rows :].fill_(-1 if what == "ids" else 0)

    def close(self) -> list[str]:
        """Give all memory back. Returns the segments that stay mapped because a result of ``prefill`` is still held. May be called twice."""
        self.bound = ()
        self.output = torch.empty(0)
        return self.arena.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _tap(hooks: Hooks, step: Step) -> Any:
    def tap(event: str, **data: Any) -> None:
        with _disable_current_modes():
            hooks.tap(step, event, **data)

    return tap


def prepare(
    program: Program,
    plan: Plan,
    *,
    comm: Comm,
    fill: Filler,
    engine: str = "portable",
    implementations: Mapping[str, Implementation] | None = None,
    warm_history: int | None = None,
) -> Session:
    """A sealed Session on this rank; collective.

    fill:            writes weights and tables (``weights.from_checkpoint``, ``weights.synthetic``)
    implementations: op -> implementation, instead of ``engine``'s
    warm_history:    history of the warm replay; default the largest, ``tokens - rows``. Caches are zero afterwards
    Raises PlanRefused, BadConfig, Unavailable (memory, or arithmetic this machine cannot keep), and RankError when ranks disagree.
    """
    comm.enter("prepare")
    check(program, plan)
    if comm.size != program.limits.ranks:
        raise BadConfig(f"program {program.name} is for {program.limits.ranks} ranks and runs on {comm.size}; plan it again for {comm.size}")
    comm.agree("program", program.digest)
    comm.agree("plan", plan.digest)
    torch.set_num_threads(1)
    if implementations is None:
        implementations = default_implementations(program, engine)
    arena = Arena(program, plan)
    try:
        fill(arena, comm)
        session = Session(program, plan, arena, comm, bind(program, arena, comm, implementations))
        _warm(session, program.limits.tokens - program.limits.rows if warm_history is None else warm_history)
        session.seal()
    except BaseException:
        arena.close()
        raise
    return session


def _warm(session: Session, history: int) -> None:
    """One replay of the largest chunk and one of none, so that whatever a library sets up at first use is there before the seal."""
    program = session.program
    plane = program.by_name["hidden"].planes[0]
    for start, rows in ((history, program.limits.rows), (0, 0)):
        hidden = torch.zeros((rows, plane.shape[1]), dtype=TORCH_DTYPES[plane.dtype])
        selection = {}
        if program.inputs:
            shape = program.by_name["ids"].planes[0].shape
            selection = {"ids": torch.full((rows, shape[1]), -1, dtype=torch.int32), "counts": torch.zeros(rows, dtype=torch.int32)}
            selection["ids"][:, :1] = 0
            selection["counts"].fill_(min(1, shape[1]))
        session.prefill(hidden, start, **selection)  # type: ignore[arg-type]
    for kind in ("persistent", "reusable", "staging", "signal"):
        if kind in session.arena.segments:
            session.arena.segment(kind).zero_()
