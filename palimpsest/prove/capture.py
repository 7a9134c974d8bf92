"""What one replay did, copied into private memory while it ran.

A Watch is the hooks of ``Session.prefill``: it plants what the case declares as planted, compares the histories with an
independent gather at the only moment they exist, and keeps copies or digests for the gates. It sends nothing, receives nothing,
and reads planned bytes only.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from palimpsest.core.spec import Step
from palimpsest.kernels.call import Call, Chunk
from palimpsest.prove.latents import LatentFile
from palimpsest.prove.peers import Caches
from palimpsest.prove.scores import Block, RowScores, ScoreLog
from palimpsest.prove.spill import Spill
from palimpsest.prove.writeset import Active, Span, WriteSet
from palimpsest.run.arena import Arena
from palimpsest.run.execute import Session
from palimpsest.run.meters import heap_bytes

Bytes = NDArray[np.uint8]
#: bytes under one digest of a long buffer
DIGEST_BLOCK = 1 << 20


def raw(tensor: torch.Tensor) -> Bytes:
    """A dense tensor's bytes, flat, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def digests(rows: Bytes) -> NDArray[np.uint64]:
    """A 64-bit digest of each row of u8 [n, bytes]."""
    made = np.empty(len(rows), np.uint64)
    for i, row in enumerate(rows):
        made[i] = int.from_bytes(hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=8).digest(), "little")
    return made


def whole_digest(flat: Bytes) -> bytes:
    """One digest of a long buffer."""
    made = hashlib.blake2b(digest_size=16)
    for at in range(0, len(flat), DIGEST_BLOCK):
        made.update(np.ascontiguousarray(flat[at : at + DIGEST_BLOCK]).data)
    return made.digest()


@dataclass
class Compared:
    """An independent gather against a history: tokens compared, bytes, and the first token that differs (or None)."""

    tokens: int = 0
    nbytes: int = 0
    first_bad: int | None = None


@dataclass
class Observation:
    """Private copies of one replay. Arrays of raw bytes are u8 [rows, bytes of a row].

    first_row, own: of the chunk, the rows this rank selects for; prepared: rows of a full chunk
    ranked: whether the selector shows its scores; twins: per compared foreign step, what differs from the engine ("" for
            nothing) and bytes compared
    """

    history: int
    rows: int
    first_row: int
    own: int
    prepared: int
    pages_before: dict[str, NDArray[np.uint64]] = field(default_factory=dict)
    pages_after: dict[str, NDArray[np.uint64]] = field(default_factory=dict)
    touched: dict[str, dict[int, Bytes]] = field(default_factory=dict)
    appended: dict[str, dict[int, Bytes]] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    allocated: list[str] = field(default_factory=list)
    inputs_before: tuple[bytes, ...] = ()
    inputs_after: tuple[bytes, ...] = ()
    index: Compared = field(default_factory=Compared)
    latent: Compared = field(default_factory=Compared)
    copies: dict[str, Bytes] = field(default_factory=dict)
    scores: dict[int, RowScores] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    ranked: bool = True
    twins: list[tuple[str, int]] = field(default_factory=list)
    poisoned: int = 0
    overwritten: int = 0
    early_damage: Span | None = None
    end_damage: Span | None = None
    slack_damage: list[str] = field(default_factory=list)
    kept_bytes: int = 0
    early_bytes: int = 0
    tail_rows_kept: bool = True
    latents: Bytes = field(default_factory=lambda: np.empty((0, 0), np.uint8))
    latents_digest: bytes = b""

    def records(self, ids: NDArray[np.integer]) -> Bytes:
        """Latent records of visible ids, past the transport: u8 [n, record]."""
        return self.latents[ids]

    @property
    def visible(self) -> int:
        return self.history + self.rows

    def array(self, name: str, dtype: Any, *shape: int) -> NDArray[Any]:
        """A captured buffer in its own type."""
        return self.copies[name].reshape(-1).view(dtype).reshape(shape)


#: called after a step with (step name, arena): plants lattice data
Plant = Callable[[str, Arena], None]


@dataclass(frozen=True)
class Room:
    """Where the copies of one replay go.

    latents: the file of all ranks' latent records; partial: the file of this rank's partial output; spill: the rest
    """

    latents: LatentFile
    partial: Path
    spill: Spill


class Watch:
    """Hooks of one replay on one rank; ``observation`` is complete after ``finish``.

    caches: the independent reader of all ranks' persistent caches
    plant:  writes the case's planted bytes after the step that would have produced them
    block:  judges finished blocks of score rows
    alone:  this rank has the process for itself, so that heap counters are its own
    room:   where the copies go
    selected: called when the selection step is over; allocating: steps that may take memory (foreign kernels)
    """

    def __init__(
        self,
        session: Session,
        caches: Caches,
        log: ScoreLog,
        *,
        observation: Observation,
        plant: Plant,
        block: Block,
        alone: bool,
        room: Room,
        selected: Callable[[], None] | None = None,
        allocating: frozenset[str] = frozenset(),
    ):
        self.selected, self.allocating = selected, allocating | {"index_select"}
        self.session, self.arena, self.caches, self.log = session, session.arena, caches, log
        self.observation, self.plant, self.alone = observation, plant, alone
        self.latents, self.partial, self.spill = room.latents, room.partial, room.spill
        self.facts = dict(session.program.facts)
        self._heap: tuple[int, int] | None = None
        log.start(block)
        self.writes: WriteSet | None = None
        self._ids_before = self._idle_rows = b""

    def seal_writes(self, poisoned: int, *, stale: bool = True) -> None:
        """Fix what may not change, right after the poison; also the persistent pages and the inputs as they are now.

        stale: what was there before is the poison, all of it; otherwise ``poisoned`` bytes were laid
        """
        o = self.observation
        segment = self.arena.segment("reusable").numpy()
        active = Active(o.visible, o.rows, o.own)
        self.writes = WriteSet(self.session.program, self.session.plan, until="gather_latent", active=active, memory=segment)
        o.poisoned = segment.nbytes if stale else poisoned
        o.kept_bytes, o.early_bytes = self.writes.kept_bytes, self.writes.early_bytes
        o.pages_before = self._pages()
        o.touched = {name: self._appended(name) for name in ("index_cache", "latent_cache")}
        self._ids_before = self._written_digest()
        o.copies["output_before"] = self.spill.copy(raw_of(self.arena, "output"))

    def _pages(self) -> dict[str, NDArray[np.uint64]]:
        limits = self.session.program.limits
        return {
            name: digests(raw(self.arena.view(name)).reshape(limits.rank_pages, -1)) for name in ("index_cache", "latent_cache")
        }

    def _written_digest(self) -> bytes:
        return b"".join(whole_digest(raw(self.arena.view(name))) for name in ("ids", "counts", "output"))

    def before(self, step: Step, call: Call, chunk: Chunk) -> None:
        if step.name == "gather_latent":
            self._at_barrier()
        elif step.name == "sparse_attend":
            self._keep("ids", "counts")
            self._gather()
        elif step.name == "reduce_output":
            self._idle_rows = whole_digest(raw(self.arena.view("output")[chunk.rows :]))
        self._heap = heap_bytes() if self.alone else None

    def after(self, step: Step, call: Call, chunk: Chunk) -> None:
        self._check_heap(step)
        self.plant(step.name, self.arena)
        o = self.observation
        if step.name == "bind_inputs":
            self._keep_rows("hidden", o.rows)
        elif step.name == "index_query":
            self._keep_rows("index_query", o.own)
            self._keep_rows("head_weights", o.own)
        elif step.name == "index_select":
            o.scores, o.complaints = dict(self.log.rows), list(self.log.complaints)
            self.log.close()
            self._keep("local_ids", "local_counts")
            if self.selected is not None:
                self.selected()
        elif step.name == "gather_latent":
            o.latent = self._compare("latent_cache", "latent_history")
        elif step.name == "sparse_attend":
            self._keep_rows("query", o.rows)
            self._keep_rows("context", o.rows)
        elif step.name == "project_output":
            made = raw(self.arena.view("partial")[: o.rows]).reshape(o.rows, -1) if o.rows else np.empty((0, 0), np.uint8)
            o.copies["partial"] = self.spill.named(self.partial, made)
        elif step.name == "reduce_output":
            o.tail_rows_kept = whole_digest(raw(self.arena.view("output")[chunk.rows :])) == self._idle_rows

    def tap(self, step: Step, event: str, **data: Any) -> None:
        if event == "scores":
            self.log.tile(data["row"], data["start"], data["scores"])
        elif event == "selected":
            self.log.finish()
        elif event == "twin":
            text = data["bad"] and f"step {step.name}: {data['bad']}"
            self.observation.twins.append((text, data["nbytes"]))

    def _check_heap(self, step: Step) -> None:
        now = heap_bytes() if self._heap else None
        if self._heap and now and now[0] != self._heap[0] and step.name not in self.allocating:
            self.observation.allocated.append(
                f"step {step.name}: bytes in large heap mappings went from {self._heap[0]} to {now[0]}"
            )

    def _keep(self, *names: str) -> None:
        for name in names:
            self.observation.copies[name] = self.spill.copy(raw_of(self.arena, name))

    def _keep_rows(self, name: str, rows: int) -> None:
        view = self.arena.view(name)
        kept = self.spill.copy(raw(view[:rows]).reshape(rows, -1)) if rows else np.empty((0, 0), np.uint8)
        self.observation.copies[name] = kept

    def _gather(self) -> None:
        """This rank's latent records from its persistent cache, before any rank can go on to another replay."""
        self.latents.write(self.session.comm.rank, self.arena.view("latent_cache").numpy(), self.observation.visible)

    def _at_barrier(self) -> None:
        """All readers of the index history are done and the latent history is not there yet."""
        assert self.writes is not None
        self.observation.index = self._compare("index_cache", "index_history")
        self.observation.early_damage = self.writes.damage_before_latent()

    def _compare(self, cache: str, history: str) -> Compared:
        """The materialised history against the persistent pages of all ranks, plane by plane."""
        o, limits = self.observation, self.session.program.limits
        planes = [
            (p, raw(self.arena.view(history, p.name)).reshape(limits.tokens, -1))
            for p in self.session.program.by_name[history].planes
        ]
        widths = [plane.shape[1] for _, plane in planes]
        found = Compared(tokens=o.visible, nbytes=o.visible * sum(widths))
        for rank, first, pages in self.caches.shards(cache, o.visible, sum(widths)):
            at = 0
            for (_, plane), width in zip(planes, widths, strict=True):
                part = pages[:, at * limits.page : (at + width) * limits.page].reshape(len(pages), limits.page, width)
                at += width
                bad = _first_difference(plane, part, rank=rank, first=first, ranks=limits.ranks, visible=o.visible)
                if bad is not None and (found.first_bad is None or bad < found.first_bad):
                    found.first_bad = bad
        return found

    def finish(self) -> Observation:
        """After the replay: the output, the persistent pages and everything else that must not have changed."""
        o = self.observation
        assert self.writes is not None
        self._keep("output")
        o.pages_after = self._pages()
        o.appended = {name: self._appended(name) for name in ("index_cache", "latent_cache")}
        o.end_damage = self.writes.damage_at_end()
        o.overwritten = self.writes.written if self._written_digest() != self._ids_before else 0
        self.writes = None
        return o

    def _appended(self, cache: str) -> dict[int, Bytes]:
        """Local page -> its bytes, for the pages that hold appended tokens of this rank."""
        o, limits = self.observation, self.session.program.limits
        if not o.rows:
            return {}
        view, rank = raw(self.arena.view(cache)).reshape(limits.rank_pages, -1), self.session.comm.rank
        touched = range(o.history // limits.page, (o.visible - 1) // limits.page + 1)
        return {p // limits.ranks: view[p // limits.ranks].copy() for p in touched if p % limits.ranks == rank}


def raw_of(arena: Arena, name: str) -> Bytes:
    """A whole buffer's bytes, flat."""
    return arena.raw(name).numpy()


def _first_difference(plane: Bytes, part: Bytes, *, rank: int, first: int, ranks: int, visible: int) -> int | None:
    """First token whose bytes in ``plane`` [tokens, width] differ from ``part`` [pages, page, width], a shard's pages from
    ``first`` on.
    """
    count, page, _ = part.shape
    begin = rank + first * ranks
    if (begin + (count - 1) * ranks + 1) * page <= visible:
        whole = plane[: len(plane) // page * page].reshape(-1, page, part.shape[2])
        mine = whole[begin : begin + (count - 1) * ranks + 1 : ranks]
        if np.array_equal(mine, part):
            return None
    for i in range(count):
        at = (begin + i * ranks) * page
        stop = min(at + page, visible)
        if at < stop and not np.array_equal(plane[at:stop], part[i, : stop - at]):
            return at + int(np.flatnonzero((plane[at:stop] != part[i, : stop - at]).any(1))[0])
    return None
