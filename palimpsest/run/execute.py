"""Prepare a plan once, then walk its steps for every chunk: the interpreter.

``prepare`` checks the plan independently, maps the arenas, fills weights and tables, binds every step to its views, tries the
arithmetic and replays the largest case once; then it seals. A sealed session allocates nothing, and refuses a request above its
capacity before any byte is touched.
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
    """Watches a replay: called around every step, and at the events an implementation names. Must not change a byte it reads."""

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
        Collective: every rank passes the same chunk. Raises CapacityError (more than was prepared) and UserError (wrong shape,
        dtype or ids) before any byte is touched, and RankError.
        """
        if self.arena.closed:
            raise UserError("this session is closed; prepare a new one")
        chunk = self._checked(hidden, history, rows)
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

    def _checked(self, hidden: torch.Tensor, history: int, rows: int | None) -> Chunk:
        limits, name, plane = self.program.limits, self.program.name, self.program.by_name["hidden"].planes[0]
        if hidden.dim() != 2 or hidden.shape[1] != plane.shape[1]:
            raise UserError(f"{name}: hidden has shape {list(hidden.shape)}; [rows, {plane.shape[1]}] is wanted")
        rows = hidden.shape[0] if rows is None else rows
        for what, value in (("history", history), ("rows", rows)):
            if type(value) is not int or value < 0:
                raise CapacityError(f"{name}: {what} = {value!r}; a whole number from 0 on is wanted")
        if rows > limits.rows:
            raise CapacityError(f"{name}: {rows} rows in one chunk, {limits.rows} are prepared; send at most {limits.rows}")
        if history + rows > limits.tokens:
            raise CapacityError(
                f"{name}: history {history} and {rows} rows make {history + rows} tokens, {limits.tokens} are prepared; "
                f"at most {max(0, limits.tokens - history)} rows still fit, or prepare a longer context"
            )
        if hidden.shape[0] < rows:
            raise UserError(f"{name}: hidden has {hidden.shape[0]} rows; {rows} are active")
        dtypes = {TORCH_DTYPES[plane.dtype], torch.float32}
        if hidden.dtype not in dtypes or hidden.device.type != "cpu":
            raise UserError(f"{name}: hidden is {hidden.dtype} on {hidden.device}; {plane.dtype} or fp32 on the CPU is wanted")
        return Chunk(history, rows, hidden[:rows])

    def _checked_selection(self, ids: torch.Tensor | None, counts: torch.Tensor | None, chunk: Chunk) -> dict[str, torch.Tensor]:
        """A shared layer's inputs, in range: an id is a visible token or the pad value -1."""
        given = {what: tensor for what, tensor in (("ids", ids), ("counts", counts)) if tensor is not None}
        wanted, name = self.program.inputs, self.program.name
        if set(given) != set(wanted):
            raise UserError(f"{name}: takes {list(wanted) or 'no selection'}; given {list(given)}")
        for what, tensor in given.items():
            shape = [chunk.rows, *self.program.by_name[what].planes[0].shape[1:]]
            if list(tensor.shape) != shape or tensor.dtype != torch.int32:
                raise UserError(f"{name}: {what} is {list(tensor.shape)} {tensor.dtype}; {shape} torch.int32 is wanted")
        if given and chunk.rows:
            _check_ids(name, given["ids"], given["counts"], chunk)
        return given

    def _put_selection(self, selected: Mapping[str, torch.Tensor], chunk: Chunk) -> None:
        for what, tensor in selected.items():
            view = self.arena.view(what)
            view[: chunk.rows].copy_(tensor)
            view[chunk.rows :].fill_(-1 if what == "ids" else 0)

    def close(self) -> list[str]:
        """Give all memory back. Returns the segments that stay mapped because a result of ``prefill`` is still held."""
        self.bound = ()
        self.output = torch.empty(0)
        return self.arena.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check_ids(name: str, ids: torch.Tensor, counts: torch.Tensor, chunk: Chunk) -> None:
    """Raise UserError for the first row whose ``counts`` leading ids are not all tokens that it can see."""
    width = ids.shape[1]
    visible = torch.arange(chunk.history + 1, chunk.visible + 1).unsqueeze(1)
    used = torch.arange(width) < counts.unsqueeze(1)
    unseen = (used & ((ids < 0) | (ids >= visible))).any(1)
    bad = unseen | (counts < 0) | (counts > width)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        if bool(unseen[row]):
            seen = chunk.history + row + 1
            raise UserError(f"{name}: row {row} selects a token outside the {seen} it can see; pass the ids of this chunk")
        raise UserError(f"{name}: row {row} counts {int(counts[row])} selected ids; ids have room for {width}")


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
    Raises PlanRefused, BadConfig, Unavailable (memory, or arithmetic this machine cannot keep), RankError when ranks disagree.
    """
    comm.enter("prepare")
    check(program, plan)
    if comm.size != program.limits.ranks:
        planned, size = program.limits.ranks, comm.size
        raise BadConfig(f"program {program.name} is for {planned} ranks and runs on {size}; plan it again for {size}")
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
    """One replay of the largest chunk and one of none: whatever a library sets up at first use is there before the seal."""
    program = session.program
    plane = program.by_name["hidden"].planes[0]
    for start, rows in ((history, program.limits.rows), (0, 0)):
        hidden = torch.zeros((rows, plane.shape[1]), dtype=TORCH_DTYPES[plane.dtype])
        selection = {}
        if program.inputs:
            shape = program.by_name["ids"].planes[0].shape
            every = torch.arange(start, start + rows, dtype=torch.int32).unsqueeze(1) - torch.arange(shape[1], dtype=torch.int32)
            selection = {"ids": every.clamp(min=0), "counts": torch.full((rows,), shape[1], dtype=torch.int32)}
        session.prefill(hidden, start, **selection)  # type: ignore[arg-type]
    for kind in ("persistent", "reusable", "staging", "signal"):
        if kind in session.arena.segments:
            session.arena.segment(kind).zero_()
