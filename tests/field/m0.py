"""M0, the micro model of the field cases, run whole in the planned memory by in-process ranks.

Index heads 2, index dim 8, latent 16 + 4, heads 4, top-k 8, chunks of 16 rows, 64 tokens, pages of 4. Numbers in the tests are
these unless they say otherwise.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from palimpsest.core.geometry import Formats, Geometry, Indexer, Rope
from palimpsest.core.spec import Limits, Program
from palimpsest.plan.place import place
from palimpsest.ranks.local import LocalWorld
from palimpsest.recipes.blocks import layer_program
from palimpsest.recipes.rope import tables
from palimpsest.run.bind import default_implementations
from palimpsest.run.execute import Session, prepare
from palimpsest.run.weights import synthetic

TOKENS, ROWS, PAGE, TOPK = 64, 16, 4, 8
FP8 = Formats()
FP32 = Formats(index="fp32", latent="fp32", activation="fp32", weights="fp32")


def geometry(
    *, topk: int = TOPK, index_heads: int = 2, schedule: tuple[str, ...] = ("full",), rope: str = "half", gate: bool = True
) -> Geometry:
    indexer = Indexer(index_heads, 8, topk, rope, 4 if rope != "none" else 0, 1e-6)
    return Geometry(
        family="micro",
        name="m0",
        hidden=32,
        layers=len(schedule),
        heads=4,
        q_lora=24,
        kv_lora=16,
        nope=8,
        rope=Rope("interleaved" if rope != "none" else "none", 4),
        v_dim=8,
        softmax_scale=0.3,
        latent_norm_eps=1e-6,
        output_gate=gate,
        indexer=indexer,
        schedule=schedule,
        max_context=TOKENS,
    )


def limits(**changes: int) -> Limits:
    return dataclasses.replace(Limits(TOKENS, ROWS, 1, PAGE), **changes)


def program(made: Geometry | None = None, formats: Formats = FP8, layer: int = 0, **sizes: int) -> Program:
    return layer_program(made or geometry(), limits(**sizes), formats, layer)


def hidden(tokens: int = TOKENS, seed: int = 9) -> torch.Tensor:
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(seed))


@dataclass
class Setup:
    """How to prepare the layer; ``run`` calls ``main(session)`` on every rank and returns what each returned."""

    made: Geometry = field(default_factory=geometry)
    formats: Formats = FP8
    layer: int = 0
    reuse: str = "on"
    seed: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    more: dict[str, object] = field(default_factory=dict)
    trace: list[tuple[int, str, str]] = field(default_factory=list)

    def run(self, main: Callable[[Session], object], hooks=None) -> list:
        made = program(self.made, self.formats, self.layer, **self.sizes)
        plan = place(made, self.reuse)

        def rank(comm):
            with prepare(made, plan, comm=comm, fill=synthetic(1, tables(self.made)), **self.more) as session:
                return main(session)

        world = LocalWorld(made.limits.ranks, seed=self.seed, hooks=hooks)
        found = world.run(rank)
        self.trace = world.trace
        return found


def run(main, *, made=None, formats=FP8, layer=0, reuse="on", seed=0, more=None, **sizes):
    """``main(session)`` of every rank."""
    return Setup(made or geometry(), formats, layer, reuse, seed, sizes, more or {}).run(main)


@dataclass
class Outcome:
    """output [tokens, hidden], ids [tokens, topk] and counts [tokens] of all chunks together."""

    output: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor

    def same(self, other: "Outcome") -> bool:
        return all(same(getattr(self, n), getattr(other, n)) for n in ("output", "ids", "counts"))

    def sets(self) -> list[list[int]]:
        return [row[:n].tolist() for row, n in zip(self.ids, self.counts.tolist(), strict=True)]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


class Kept:
    """Hooks around other hooks: copies ids and counts while they live, right before attention reads them."""

    def __init__(self, inner=None):
        self.inner, self.ids, self.counts = inner, torch.empty(0), torch.empty(0)

    def before(self, step, call, chunk) -> None:
        if self.inner:
            self.inner.before(step, call, chunk)
        if step.name == "sparse_attend":
            self.ids, self.counts = (call.view(name)[: chunk.rows].clone() for name in ("ids", "counts"))

    def after(self, step, call, chunk) -> None:
        if self.inner:
            self.inner.after(step, call, chunk)

    def tap(self, step, event, **data) -> None:
        if self.inner:
            self.inner.tap(step, event, **data)


def prefill(
    session: Session, chunks: Sequence[int], rows: torch.Tensor | None = None, *, start: int = 0, before=None, hooks=None, **more
) -> Outcome:
    """``chunks`` rows one after the other from token ``start`` on; ``before(session, history, count)`` runs ahead of each.

    Ids are dead once attention has read them and their bytes may be reused, so they are copied in time.
    """
    rows, kept = hidden() if rows is None else rows, Kept(hooks)
    at, parts = start, []
    for count in chunks:
        if before:
            before(session, at, count)
        output = session.prefill(rows[at : at + count], at, copy=True, hooks=kept, **more)
        parts.append((output, kept.ids, kept.counts))
        at += count
    return Outcome(*(torch.cat(column) for column in zip(*parts, strict=True)))


def whole(session: Session, chunks: Sequence[int] = (16, 16, 16, 16), rows: torch.Tensor | None = None, **more) -> Outcome:
    return prefill(session, chunks, rows, **more)


def outcome(chunks: Sequence[int] = (16, 16, 16, 16), data: torch.Tensor | None = None, **setup) -> Outcome:
    """The prefill of ``chunks`` on fresh ranks, which must all end with the same bytes; of the standard rows, made once.

    Keywords are ``run``'s: ``rows`` is the prepared rows of a chunk, ``data`` the hidden rows.
    """
    if data is None:
        return _standard(tuple(chunks), **setup)
    return agreed(run(lambda session: whole(session, chunks, data), **setup))


@cache
def _standard(chunks: tuple[int, ...], **setup) -> Outcome:
    return agreed(run(lambda session: whole(session, chunks), **setup))


def agreed(found: Sequence[Outcome]) -> Outcome:
    """What all ranks found, which must be the same bytes."""
    first, *others = found
    assert all(first.same(other) for other in others), "ranks disagree"
    return first


def each(chunkings: Sequence[Sequence[int]], **setup) -> list[Outcome]:
    """One outcome per chunking, all on the same sealed ranks."""
    found = run(lambda session: [whole(session, chunks) for chunks in chunkings], **setup)
    return [agreed(column) for column in zip(*found, strict=True)]


def plain(tokens: int) -> tuple[int, ...]:
    """``tokens`` in chunks of 16 and a rest."""
    return (16,) * (tokens // 16) + ((tokens % 16,) if tokens % 16 else ())


class Watch:
    """Hooks for ``Session.prefill`` that call what they are given: ``before`` and ``after`` by step name, ``tap`` by event."""

    def __init__(self, *, before=None, after=None, tap=None):
        self._before, self._after, self._tap = before or {}, after or {}, tap

    def before(self, step, call, chunk) -> None:
        self._each(self._before, step, call, chunk)

    def after(self, step, call, chunk) -> None:
        self._each(self._after, step, call, chunk)

    def tap(self, step, event, **data) -> None:
        if self._tap:
            self._tap(step, event, data)

    @staticmethod
    def _each(table, step, call, chunk) -> None:
        for name in (step.name, "*"):
            if name in table:
                table[name](step, call, chunk)


class Scores:
    """Collects the engine's own scores by absolute row; ``history`` is set by the test before each chunk."""

    def __init__(self):
        self.rows: dict[int, np.ndarray] = {}
        self.tiles: dict[int, int] = {}
        self.history = 0
        self.hooks = Watch(tap=self._tap)

    def begin(self, session, history: int, count: int) -> None:
        self.history = history

    def _tap(self, step, event, data) -> None:
        if event != "scores":
            return
        row = self.history + data["row"]
        found = self.rows.setdefault(row, np.full(0, np.float32(0)))
        assert data["start"] == len(found)
        self.rows[row] = np.concatenate([found, data["scores"]])
        self.tiles[row] = self.tiles.get(row, 0) + 1


def altered(made: Program, op: str, wrapper: Callable) -> dict[str, object]:
    """``prepare`` arguments that wrap one op's implementation: ``wrapper(run, call, chunk)``."""
    known = default_implementations(made, "portable")
    inner = known[op]
    return {"implementations": {**known, op: lambda call, chunk: wrapper(inner, call, chunk)}}


def fill_reusable(session: Session, byte: int) -> None:
    session.arena.segment("reusable").fill_(byte)
