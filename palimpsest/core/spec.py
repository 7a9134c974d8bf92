"""Buffer, Step, Program, Limits: what a recipe declares.

A recipe says order, never addresses. Nothing here knows an offset, and nobody types a lifetime: both are derived (``plan/``).
A step receives views of the buffers it declares and nothing else, so a declaration cannot lie.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from palimpsest.core.canon import digest
from palimpsest.core.errors import BadConfig
from palimpsest.core.units import CPU_ALIGN, Ranks, Rows, Tokens, dtype_bytes, plain_count

#: classes of bytes. Only ``reusable`` buffers may share bytes; each class has a segment of its own.
KINDS = ("weights", "persistent", "reusable", "staging", "table", "signal")

#: axis sizes that may differ between calls, up to the prepared one
AXES = ("tokens", "rows", "slice", "topk", "heads", "pages", "ranks", "fixed")


@dataclass(frozen=True)
class Limits:
    """The prepared capacity. Each number is a whole number or a count of the right thing (``units.Tokens``, ``Rows``, ``Ranks``).

    tokens: history tokens a request may reach, a multiple of ``page``
    rows:   query rows of one prefill chunk
    ranks:  tensor-parallel ranks; caches are sharded over them by ``page``-token blocks, round robin
    page:   tokens of one cache page and of one shard block
    """

    tokens: int
    rows: int
    ranks: int
    page: int = 64

    def __post_init__(self) -> None:
        for name, unit in (("tokens", Tokens), ("rows", Rows), ("ranks", Ranks), ("page", Tokens)):
            value = plain_count(getattr(self, name), unit, name)
            if value < 1:
                raise BadConfig(f"{name} = {value!r} must be a positive whole number")
            object.__setattr__(self, name, value)
        if self.tokens % self.page:
            raise BadConfig(
                f"context {self.tokens} is not a multiple of the page of {self.page} tokens; "
                f"use {self.tokens // self.page * self.page} or {(self.tokens // self.page + 1) * self.page}"
            )
        if self.rows > self.tokens:
            raise BadConfig(f"rows {self.rows} exceed the context of {self.tokens} tokens; prepare at most {self.tokens} rows")
        if self.tokens > 1 << 31:
            raise BadConfig(f"context {self.tokens} does not fit the int32 token ids; the largest is {1 << 31}")

    @property
    def slice_rows(self) -> int:
        """Query rows one rank selects for: rank r owns rows [r*slice_rows, (r+1)*slice_rows)."""
        return -(-self.rows // self.ranks)

    @property
    def rank_pages(self) -> int:
        """Cache pages one rank holds (the same on every rank: the largest share)."""
        return -(-(self.tokens // self.page) // self.ranks)


@dataclass(frozen=True)
class Plane:
    """A named, typed sub-view of a buffer: ``shape`` over ``axes``, dense, at the end of the plane before it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        count = dtype_bytes(self.dtype)
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Buffer:
    """Bytes with a name. ``formula`` is the sentence a person reads beside the number."""

    name: str
    kind: str
    planes: tuple[Plane, ...]
    formula: str
    align: int = CPU_ALIGN

    @cached_property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def plane_offset(self, name: str) -> int:
        """Byte offset of a plane inside the buffer."""
        at = 0
        for plane in self.planes:
            if plane.name == name:
                return at
            at += plane.nbytes
        raise KeyError(f"buffer {self.name} has no plane {name!r}; it has {[p.name for p in self.planes]}")


@dataclass(frozen=True)
class Step:
    """One op call.

    op:      name of the contract in ``kernels/``
    phase:   p0..p8 or ``barrier``, the design's vocabulary, for reports and events
    reads, writes, updates: pairs (role in the op's contract, buffer name). ``writes`` overwrites whatever was there;
             ``updates`` reads and writes.
    scratch: bytes the op may use inside the step and forgets afterwards, from its contract
    params:  pairs (name, value) the op reads, fixed at planning
    scope:   ``rank``, or ``all`` for a step that every rank must reach before any rank passes it (a barrier)
    queue:   steps of one queue run in order
    after:   names of steps in other queues that must be finished first (events)
    """

    name: str
    op: str
    phase: str
    reads: tuple[tuple[str, str], ...] = ()
    writes: tuple[tuple[str, str], ...] = ()
    updates: tuple[tuple[str, str], ...] = ()
    scratch: int = 0
    params: tuple[tuple[str, int | str | float | bool], ...] = ()
    scope: str = "rank"
    queue: str = "main"
    after: tuple[str, ...] = ()

    @property
    def scratch_name(self) -> str:
        """Name of the implicit reusable buffer that holds this step's scratch."""
        return f"{self.name}.scratch"

    def accesses(self) -> tuple[tuple[str, str], ...]:
        """Pairs (access, buffer name) with access ``read``, ``write`` or ``update``, scratch included."""
        found = [("read", b) for _, b in self.reads] + [("write", b) for _, b in self.writes]
        found += [("update", b) for _, b in self.updates]
        if self.scratch:
            found.append(("write", self.scratch_name))
        return tuple(found)


@dataclass(frozen=True)
class Program:
    """Buffers and steps of a recipe at fixed limits: the spine's first value.

    histories: names of (early, late) history buffers whose overlap ``--reuse off`` undoes
    inputs, outputs: buffers the caller fills before the first step, and reads after the last one
    facts: pairs a report shows (layer, record formats, engine-independent choices)
    """

    name: str
    limits: Limits
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    histories: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    facts: tuple[tuple[str, int | str | float | bool], ...] = ()

    def __post_init__(self) -> None:
        self._check_names()
        self._check_steps()

    def _check_names(self) -> None:
        for what, names in (("buffer", [b.name for b in self.buffers]), ("step", [s.name for s in self.steps])):
            twice = {n for n in names if names.count(n) > 1} if len(set(names)) < len(names) else set()
            if twice:
                raise BadConfig(f"program {self.name}: {what} {min(twice)!r} is declared twice")
        for buffer in self.buffers:
            if buffer.kind not in KINDS:
                raise BadConfig(f"program {self.name}: buffer {buffer.name} has kind {buffer.kind!r}; kinds are {KINDS}")

    def _check_steps(self) -> None:
        known = set(self.by_name)
        queues: dict[str, str] = {}
        for step in self.steps:
            for access, name in step.accesses():
                if name not in known:
                    raise BadConfig(f"program {self.name}: step {step.name} {access}s {name!r}, which no buffer declares")
            for other in step.after:
                if other not in queues:
                    raise BadConfig(f"program {self.name}: step {step.name} waits for {other!r}, which does not come before it")
            queues[step.name] = step.queue
        for name in (*self.histories, *self.inputs, *self.outputs):
            if name not in known:
                raise BadConfig(f"program {self.name}: {name!r} is named but no buffer declares it")

    @cached_property
    def all_buffers(self) -> tuple[Buffer, ...]:
        """Declared buffers, then one reusable buffer per step that has scratch."""
        scratch = tuple(
            Buffer(s.scratch_name, "reusable", (Plane("bytes", "u8", (s.scratch,), ("fixed",)),), f"scratch of {s.op}")
            for s in self.steps
            if s.scratch
        )
        return self.buffers + scratch

    @cached_property
    def by_name(self) -> dict[str, Buffer]:
        return {b.name: b for b in self.all_buffers}

    @cached_property
    def digest(self) -> str:
        return digest(self)

    def with_steps(self, steps: tuple[Step, ...]) -> "Program":
        """The same buffers under another order: for the checker's own tests and for ``explain``."""
        return dataclasses.replace(self, steps=steps)
