"""What each rank runs: both arrangements, all cases, every gate, on real planned memory.

``run_rank`` is the target of ``ranks.spawn`` and of ``ranks.local``. Within a case: fill the persistent caches, poison, replay
with a Watch, then judge. Cases of one queue are replayed without a judgement between them. Ranks share small facts through files
of the run's private folder and meet at barriers of ``Comm``; what the gates compare with is read past ``Comm``.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the seal guard's first use imports it: seconds, once here instead of once in every forked rank

from palimpsest.core.units import ceil_div
from palimpsest.kernels.call import TORCH_DTYPES, Implementation
from palimpsest.kernels.sizes import ID_BLOCK
from palimpsest.prove import fill, gates_output, gates_storage
from palimpsest.prove.capture import Observation, Room, Watch, raw, whole_digest
from palimpsest.prove.cases import Case, Replay, audited_rows, rank_rows
from palimpsest.prove.data import Data
from palimpsest.prove.expect import ARRANGEMENTS, expect_case
from palimpsest.prove.extras import Extras
from palimpsest.prove.foreign_run import ForeignRun
from palimpsest.prove.gates import SEAL, Sheet
from palimpsest.prove.gates_pairs import Kept
from palimpsest.prove.gates_select import Judge
from palimpsest.prove.judging import Facts, Judging, Stage, Taken
from palimpsest.prove.latents import LatentFile
from palimpsest.prove.peers import Caches, Peer, read_card, write_card
from palimpsest.prove.rank_setup import Job, Setup
from palimpsest.prove.scores import ScoreLog
from palimpsest.prove.spill import Spill, give_back
from palimpsest.prove.tail import Tail
from palimpsest.prove.turns import InTurn, turns_of
from palimpsest.prove.verdicts import Counters, Plan, Verdict
from palimpsest.ranks.comm import Comm
from palimpsest.run.bind import default_implementations
from palimpsest.run.execute import Session, prepare
from palimpsest.run.guards import SlackCanaries
from palimpsest.run.meters import Mapped, Reading, arena_mappings, mappings, meter
from palimpsest.run.poison import poison

#: torch's allocator is metered as well (A3) in the longest replay of at most so many rows, on every rank while rows, id blocks
#: and ranks multiply to at most METERED_EVENTS, on rank 0 otherwise: torch's profiler keeps every operation in memory
METERED_ROWS, METERED_EVENTS = 256, 8192
#: cases whose alias replays run under the allocation guard: full, partial, one row, none. It doubles the time of small steps;
#: in every case
#: mappings and large heap blocks are compared
GUARDED = ("C02", "C05", "C06", "C07")

#: hidden rows made at once
ROWS = 1024

Emit = Callable[[Any], None]
#: (arrangement, op -> implementation) -> what to bind instead
Alter = Callable[[str, dict[str, Implementation]], Mapping[str, Implementation]]


def run_rank(comm: Comm, config: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Qualify on this rank. Returns ``{"flags": [...], "certificates": [...], "facts": {...}}``, JSON-able."""
    return Qualifier(comm, Setup(Job.from_json(config)), emit).run()


class Qualifier(Judging):
    """The run of one rank.

    alter: changes the implementations before they are bound; how a test shows that a gate can fail
    """

    def __init__(self, comm: Comm, setup: Setup, emit: Emit, *, alter: Alter | None = None):
        self.comm, self.setup, self.emit, self.rank, self.alter = comm, setup, emit, comm.rank, alter
        self._phase = ("prepare", time.monotonic_ns())
        self.folder = Path(setup.job.workdir)
        self.facts, self.certificates = Facts(), []
        self.sheets = {SEAL: Sheet(SEAL, self.rank)} | {case.id: Sheet(case.id, self.rank) for case in setup.cases}
        self.kept: dict[tuple[str, str, int], Kept] = {}
        self.oracle = gates_output.Oracle(setup.output_facts)
        self.known: dict[bytes, Verdict] = {}
        self.spill = Spill(self.folder)
        self.turns = turns_of(setup, comm)
        self.foreign = ForeignRun(setup)
        self.extras = Extras(setup, comm, self.sheets)

    def run(self) -> dict[str, Any]:
        comm, setup = self.comm, self.setup
        comm.enter("agree")
        comm.agree("qualification", setup.digest)
        self.extras.agree()
        for case in setup.cases:
            lattice = [self._lattice(case, step) for step in case.steps]
            expect_case(self.sheets[case.id], setup.prepared, case, self.rank, lattice)
            self.extras.expect(case)
            self.foreign.expect(self.sheets[case.id], case, self.rank)
        mapped: dict[str, list[Mapped]] = {}
        for name in ARRANGEMENTS:
            mapped[name] = self._arrangement(name)
            # the next one's memory is there only when every tensor over this one's is gone
            give_back()
        self._clock("seal")
        self._seal(mapped)
        self._clock("")
        flags = [line for sheet in self.sheets.values() for line in sheet.close()]
        return {
            "flags": flags,
            "certificates": self.foreign.keep(self.certificates, self.folder, self.rank),
            "facts": asdict(self.facts),
            **self.extras.result(),
        }

    def _arrangement(self, name: str) -> list[Mapped]:
        """Prepare one arrangement, replay and judge all cases in it, give its memory back; its mappings as they were sealed."""
        stage = self._prepare(name)
        with stage.session, contextlib.closing(stage.caches):
            for queue in self.setup.queues:
                self._queue(stage, queue)
            if name == ARRANGEMENTS[-1]:
                self.extras.dedicated(stage.session, self._tell_seal, allocating=bool(self.foreign.allocating))
            # nobody may read this rank's memory any more when it goes
            self.comm.enter(f"close {name}")
            self.comm.barrier(f"close {name}")
        return stage.mappings

    # -- preparing

    def _prepare(self, name: str) -> Stage:
        comm, setup = self.comm, self.setup
        self._clock("prepare")
        self.emit({"arrangement": name, "case": SEAL, "phase": "prepare"})
        bound = self.foreign.bound()
        if self.alter:
            bound = dict(self.alter(name, bound or default_implementations(setup.program, setup.job.engine)))
        session = prepare(
            setup.program,
            setup.plans[name],
            comm=self.extras.logged[name],
            fill=setup.filler(),
            engine=setup.job.engine,
            implementations=bound,
        )
        arena = session.arena
        mapped = arena_mappings(arena)
        self.facts.requested[name] = arena.logical_bytes
        self.facts.pss[name] = sum(m.pss for m in mapped)
        slack = SlackCanaries(arena, setup.job.seed)
        comm.barrier(f"cards {name}")
        write_card(self.folder, name, self.rank, arena)
        comm.barrier(f"cards {name} written")
        with self.turns.turn():
            self.extras.sealed(name, session)
        peers = [Peer(read_card(self.folder, name, rank)) for rank in range(comm.size)]
        return Stage(
            name=name,
            session=session,
            mappings=mapped,
            caches=Caches(peers, setup.profile.page),
            seeded=fill.Caches(arena, self.rank),
            tail=Tail(session),
            log=ScoreLog(setup.profile.tokens),
            slack=slack,
            addresses=gates_storage.addresses(arena),
            inputs=self._inputs(session),
        )

    @staticmethod
    def _inputs(session: Session) -> tuple[bytes, bytes]:
        """Digests of the weights and of the tables."""
        found = []
        for kind in ("weights", "table"):
            there = kind in session.arena.segments
            found.append(whole_digest(session.arena.segment(kind).numpy()) if there else b"")
        return found[0], found[1]

    def _lattice(self, case: Case, step: Replay) -> set[int]:
        data = self.setup.data(case)
        return {row for row in range(step.rows) if data.lattice_row(step, row)}

    # -- replaying

    def _queue(self, stage: Stage, queue: list[Case]) -> None:
        """One case alone judges after each replay; a queue judges at its end."""
        alone = len(queue) == 1
        taken: list[Taken] = []
        started = time.monotonic_ns()
        counters = {case.id: Counters() for case in queue}
        for case in queue:
            data = self.setup.data(case)
            for number, step in enumerate(case.steps):
                self._tell(stage, case, number, "fill")
                if alone or not taken:
                    with self.turns.turn():
                        stage.seeded.fill(data, step.history)
                taken.append(self._replay(stage, case, number, step, data, counters[case.id]))
                if alone:
                    self._judge(stage, taken, counters, last=number == len(case.steps) - 1)
                    taken = []
                give_back()
        if taken:
            self._judge(stage, taken, counters, last=True)
        for case in queue:
            self.facts.times.setdefault(case.id, {})[stage.name] = (started, time.monotonic_ns())

    def _tell(self, stage: Stage, case: Case, number: int, phase: str) -> None:
        self._clock(f"{case.id} {phase}")
        self.comm.enter(f"{case.id} {stage.name} {phase} {number}")
        self.emit({"arrangement": stage.name, "case": case.id, "replay": number, "replays": len(case.steps), "phase": phase})

    def _clock(self, phase: str) -> None:
        """The time until the next call belongs to ``phase``."""
        now = time.monotonic_ns()
        name, since = self._phase
        self.facts.phases[name] = self.facts.phases.get(name, 0) + now - since
        self._phase = phase, now

    def _tell_seal(self, phase: str) -> None:
        self._clock(phase)
        self.comm.enter(f"{SEAL} {phase}")
        self.emit({"arrangement": ARRANGEMENTS[-1], "case": SEAL, "phase": phase})

    def _replay(self, stage: Stage, case: Case, number: int, step: Replay, data: Data, counters: Counters) -> Taken:
        """Poison, replay, copy. Nothing is judged but the score blocks, which exist only now."""
        setup, comm, session = self.setup, self.comm, stage.session
        first = self.rank * setup.profile.slice_rows
        own = rank_rows(setup.profile, step.rows)[self.rank]
        room = self._room(stage, case, number)
        o = Observation(
            history=step.history,
            rows=step.rows,
            first_row=first,
            own=own,
            prepared=setup.profile.rows,
            ranked=not self.foreign.selects,
        )
        judge = self._judge_of(stage, case, number, step, data, counters, o)
        with self.turns.turn():
            hidden = self._hidden(data, step)
        self._tell(stage, case, number, "replay")
        seed = setup.job.seed + number
        with self.turns.turn():
            poisoned = poison(session.arena, step.poison, seed=seed, visible=step.visible)
        rows = range(first, first + own)
        watch = Watch(
            session, stage.caches, stage.log, observation=o, block=judge.block, alone=setup.job.alone, room=room,
            selected=self.foreign.selected(judge), allocating=self.foreign.allocating,
            plant=lambda name, arena: fill.plant(name, arena, case=case, step=step, data=data, rank=self.rank, rows=rows),
        )  # fmt: skip
        with self.turns.turn():
            watch.seal_writes(poisoned, stale=step.poison in ("Ps", "none"))
        o.inputs_before = (whole_digest(raw(hidden)), *stage.inputs)
        comm.barrier(f"{case.id} start")
        o.moved = gates_storage.moved(session.arena, stage.addresses)
        before = self._mapped(session)
        hooks = InTurn(self.extras.watched(stage.name, watch, session), self.turns)
        if self._metered(case, number):
            with meter(session.arena, torch_memory=True) as reading:
                session.prefill(hidden, step.history, hooks=hooks, guard=True)
            self._torch_memory(o, reading)
        else:
            session.prefill(hidden, step.history, hooks=hooks, guard=stage.name == "alias" and case.id in GUARDED)
        self.extras.replayed((stage.name, case.id, number))
        self._mappings(o, before, self._mapped(session))
        with self.turns.turn():
            watch.finish()
        o.moved += gates_storage.moved(session.arena, stage.addresses)
        o.inputs_after = (whole_digest(raw(hidden)), *self._inputs(session))
        slack = stage.slack.damage()
        with self.turns.turn():
            made = stage.tail.append(o, hidden) if step.rows else {}
        comm.barrier(f"{case.id} replayed")
        o.latents, o.latents_digest = room.latents.read(o.visible)
        if step.restore:
            self._restore(stage, o)
        else:
            stage.seeded.appended(step)
        planted = self._planted(stage, case, step, data, made)
        return Taken(case, step, number, o, judge, hidden, room.latents, planted, slack)

    def _metered(self, case: Case, number: int) -> bool:
        """Whether torch's allocator is metered in this replay; one profiler at a time needs a process of its own."""
        few = [(s.visible, c.id, i) for c in self.setup.cases for i, s in enumerate(c.steps) if 1 < s.rows <= METERED_ROWS]
        if not self.setup.job.alone or self.foreign.allocating or not few:
            return False
        longest = max(visible for visible, _, _ in few)
        first = next(key for visible, *key in few if visible == longest)
        events = case.steps[number].rows * ceil_div(self.setup.geometry.indexer.topk, ID_BLOCK) * self.comm.size
        return [case.id, number] == first and (self.rank == 0 or events <= METERED_EVENTS)

    def _room(self, stage: Stage, case: Case, number: int) -> Room:
        """Where the copies of one replay go."""
        path = self.folder / f"latents-{stage.name}-{case.id}-{number}"
        latents = LatentFile(path, self.setup.profile.page, self.setup.record_bytes["latent_cache"], self.comm.size)
        return Room(latents, self._partial_file(stage.name, case.id, number, self.rank), self.spill)

    @staticmethod
    def _mapped(session: Session) -> list[Mapped]:
        """The arena's mappings by address, without their resident sizes: reading those walks every page."""
        return mappings([s.inode for s in session.arena.segments.values()], smaps="/proc/self/maps")

    def _mappings(self, o: Observation, *readings: list[Mapped]) -> None:
        """A3: the mappings are those of before the replay."""
        before, after = ([(m.name, m.start, m.nbytes, m.access) for m in reading] for reading in readings)
        if before != after:
            o.allocated.append(f"mappings changed from {len(before)} to {len(after)}: {sorted(set(before) ^ set(after))[:1]}")

    def _torch_memory(self, o: Observation, reading: Reading) -> None:
        """A3: torch's allocator handed out nothing, not even for a moment inside one operation."""
        if reading.torch_peak:
            self.facts.torch_peak = max(self.facts.torch_peak, reading.torch_peak)
            o.allocated.append(
                f"torch handed out {reading.torch_total} bytes, {reading.torch_peak} at once, in pieces "
                f"of up to {reading.torch_largest}"
            )

    def _hidden(self, data: Data, step: Replay) -> torch.Tensor:
        """The caller's normed hidden rows, in the activation dtype."""
        dtype = TORCH_DTYPES[self.setup.job.formats.activation]
        width = self.setup.geometry.hidden
        if not step.rows:
            return torch.empty((0, width), dtype=dtype)
        flat = torch.from_numpy(self.spill.empty((step.rows * width * dtype.itemsize,), np.uint8))
        made = flat.view(dtype).view(step.rows, width)
        for start in range(0, step.rows, ROWS):
            stop = min(start + ROWS, step.rows)
            made[start:stop].copy_(torch.from_numpy(data.hidden(step, start, stop)))
        return made

    def _judge_of(
        self, stage: Stage, case: Case, number: int, step: Replay, data: Data, counters: Counters, o: Observation
    ) -> Judge:
        setup = self.setup
        first, own = o.first_row, o.own
        audited = frozenset(row for row, owner in audited_rows(setup.profile, step, setup.job.seed) if owner == self.rank)
        lattice = frozenset(row for row in self._lattice(case, step) if first <= row < first + own)
        zero = data.zero_row(step)
        base = self.kept.get(("base", case.id, number)) if stage.name == "alias" else None
        plan = Plan(audited, lattice, -1 if zero is None else zero, case.planted, None if base is None else base.local_ids)
        arena = stage.session.arena

        def ids() -> tuple[Any, Any]:
            return arena.view("local_ids").numpy(), arena.view("local_counts", "counts").numpy()

        judge = self.foreign.judge(
            self.sheets[case.id],
            setup.index_facts,
            plan,
            where=f"{stage.name} replay {number}",
            counters=counters,
            ids=ids,
            caches=stage.caches,
            known=self.known,
        )
        judge.observation, judge.metered = o, self._metered(case, number)
        return judge

    def _restore(self, stage: Stage, o: Observation) -> None:
        """Put back the persistent records that this replay appended."""
        for cache, pages in o.touched.items():
            view = stage.session.arena.view(cache).numpy()
            for local, before in pages.items():
                view[local] = before

    def _planted(
        self, stage: Stage, case: Case, step: Replay, data: Data, made: dict[str, dict[int, Any]]
    ) -> dict[str, dict[int, Any]]:
        """The encode to compare with: planted index records where the case plants them, else what appending wrote on private
        pages.
        """
        if not step.rows or step.regime not in ("lattice", "mixed") or case.records != "lattice":
            return made
        limits = self.setup.profile.limits
        values, scales = data.index_records(step.history, step.visible)
        for local, page in made["index_cache"].items():
            start = (local * limits.ranks + self.rank) * limits.page
            low, high = max(start, step.history), min(start + limits.page, step.visible)
            width = values.shape[1]
            page[(low - start) * width : (high - start) * width] = values[low - step.history : high - step.history].reshape(-1)
            if scales is not None:
                held = page[limits.page * width :].view("<f4")
                held[low - start : high - start] = scales[low - step.history : high - step.history]
        return made
