"""What each rank runs: both arrangements, all cases, every gate, on real planned memory.

``run_rank`` is the target of ``ranks.spawn`` and of ``ranks.local``. Within a case: fill the persistent caches, poison, replay
with a Watch, then judge. Cases of one queue are replayed without a judgement between them. Ranks share small facts through files
of the run's private folder and meet at barriers of ``Comm``; what the gates compare with is read past ``Comm``.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the seal guard's first use imports it: seconds, once here instead of once in every forked rank

from palimpsest.kernels.call import TORCH_DTYPES, Implementation
from palimpsest.prove import fill, gates_output, gates_pairs, gates_select, gates_storage
from palimpsest.prove.capture import Observation, Watch, raw, whole_digest
from palimpsest.prove.cases import Case, Replay, audited_rows, rank_rows
from palimpsest.prove.data import Data
from palimpsest.prove.expect import ARRANGEMENTS, expect_case
from palimpsest.prove.extras import Extras
from palimpsest.prove.foreign_run import ForeignRun
from palimpsest.prove.gates import SEAL, Sheet
from palimpsest.prove.gates_pairs import Kept
from palimpsest.prove.gates_select import Counters, Judge
from palimpsest.prove.peers import Caches, Peer, read_card, write_card
from palimpsest.prove.rank_setup import Job, Setup
from palimpsest.prove.scores import ScoreLog
from palimpsest.prove.tail import Tail
from palimpsest.ranks.comm import Comm
from palimpsest.run.bind import default_implementations
from palimpsest.run.execute import Session, prepare
from palimpsest.run.guards import SlackCanaries
from palimpsest.run.meters import Mapped, Reading, arena_mappings, mappings, meter
from palimpsest.run.poison import poison

#: the largest case, in which torch's allocator is metered as well (A3); one profiler at a time needs a process of its own
METERED = "C03"
#: cases whose alias replays run under the allocation guard: full, partial, one row, none. It doubles the time of small steps;
#: in every case
#: mappings and large heap blocks are compared
GUARDED = ("C02", "C05", "C06", "C07")

Emit = Callable[[Any], None]
#: (arrangement, op -> implementation) -> what to bind instead
Alter = Callable[[str, dict[str, Implementation]], Mapping[str, Implementation]]


def run_rank(comm: Comm, config: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Qualify on this rank. Returns ``{"flags": [...], "certificates": [...], "facts": {...}}``, JSON-able."""
    return Qualifier(comm, Setup(Job.from_json(config)), emit).run()


@dataclass
class Taken:
    """One replay waiting to be judged."""

    case: Case
    step: Replay
    number: int
    observation: Observation
    judge: Judge
    hidden: torch.Tensor
    made: dict[str, dict[int, Any]]
    slack: list[str]

    @property
    def where(self) -> str:
        return f"replay {self.number}"


@dataclass
class Stage:
    """One arrangement, prepared."""

    name: str
    session: Session
    mappings: list[Mapped]
    caches: Caches
    seeded: fill.Caches
    tail: Tail
    log: ScoreLog
    slack: SlackCanaries
    addresses: dict[str, int]
    inputs: tuple[bytes, bytes]


@dataclass
class Facts:
    """What the record shows beside the flags."""

    logical: dict[str, int] = field(default_factory=dict)
    requested: dict[str, int] = field(default_factory=dict)
    mapped: dict[str, dict[str, int]] = field(default_factory=dict)
    pss: dict[str, int] = field(default_factory=dict)
    changed_rows: int = 0
    rows_selecting: int = 0
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    times: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    lint_files: int = 0
    torch_peak: int = 0


class Qualifier:
    """The run of one rank.

    alter: changes the implementations before they are bound; how a test shows that a gate can fail
    """

    def __init__(self, comm: Comm, setup: Setup, emit: Emit, *, alter: Alter | None = None):
        self.comm, self.setup, self.emit, self.rank, self.alter = comm, setup, emit, comm.rank, alter
        self.folder = Path(setup.job.workdir)
        self.facts, self.certificates = Facts(), []  # type: ignore[var-annotated]
        self.sheets = {SEAL: Sheet(SEAL, self.rank)} | {case.id: Sheet(case.id, self.rank) for case in setup.cases}
        self.kept: dict[tuple[str, str, int], Kept] = {}
        self.oracle = gates_output.Oracle(setup.output_facts)
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
            stage = self._prepare(name)
            mapped[name] = stage.mappings
            with stage.session, contextlib.closing(stage.caches):
                for queue in setup.queues:
                    self._queue(stage, queue)
                if name == ARRANGEMENTS[-1]:
                    self.extras.dedicated(stage.session, self._tell_seal, allocating=bool(self.foreign.allocating))
                # nobody may read this rank's memory any more when it goes
                comm.enter(f"close {name}")
                comm.barrier(f"close {name}")
        self._seal(mapped)
        flags = [line for sheet in self.sheets.values() for line in sheet.close()]
        return {
            "flags": flags,
            "certificates": self.foreign.keep(self.certificates, self.folder, self.rank),
            "facts": asdict(self.facts),
            **self.extras.result(),
        }

    # -- preparing

    def _prepare(self, name: str) -> Stage:
        comm, setup = self.comm, self.setup
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
                    stage.seeded.fill(data, step.history)
                taken.append(self._replay(stage, case, number, step, data, counters[case.id]))
                if alone:
                    self._judge(stage, taken, counters, last=number == len(case.steps) - 1)
                    taken = []
        if taken:
            self._judge(stage, taken, counters, last=True)
        for case in queue:
            self.facts.times.setdefault(case.id, {})[stage.name] = (started, time.monotonic_ns())

    def _tell(self, stage: Stage, case: Case, number: int, phase: str) -> None:
        self.comm.enter(f"{case.id} {stage.name} {phase} {number}")
        self.emit({"arrangement": stage.name, "case": case.id, "replay": number, "replays": len(case.steps), "phase": phase})

    def _tell_seal(self, phase: str) -> None:
        self.comm.enter(f"{SEAL} {phase}")
        self.emit({"arrangement": ARRANGEMENTS[-1], "case": SEAL, "phase": phase})

    def _replay(self, stage: Stage, case: Case, number: int, step: Replay, data: Data, counters: Counters) -> Taken:
        """Poison, replay, copy. Nothing is judged but the score blocks, which exist only now."""
        setup, comm, session = self.setup, self.comm, stage.session
        first = self.rank * setup.profile.slice_rows
        own = rank_rows(setup.profile, step.rows)[self.rank]
        o = Observation(
            history=step.history,
            rows=step.rows,
            first_row=first,
            own=own,
            prepared=setup.profile.rows,
            ranked=not self.foreign.selects,
        )
        judge = self._judge_of(stage, case, number, step, data, counters, o)
        hidden = self._hidden(data, step)
        self._tell(stage, case, number, "replay")
        seed = setup.job.seed + number
        poisoned = poison(session.arena, step.poison, seed=seed, visible=step.visible)
        rows = range(first, first + own)
        watch = Watch(
            session, stage.caches, stage.log, observation=o, block=judge.block, alone=setup.job.alone,
            selected=self.foreign.selected(judge), allocating=self.foreign.allocating,
            plant=lambda name, arena: fill.plant(name, arena, case=case, step=step, data=data, rank=self.rank, rows=rows),
        )  # fmt: skip
        watch.seal_writes(poisoned, stale=step.poison in ("Ps", "none"))
        o.inputs_before = (whole_digest(raw(hidden)), *stage.inputs)
        comm.barrier(f"{case.id} start")
        o.moved = gates_storage.moved(session.arena, stage.addresses)
        before = self._mapped(session)
        hooks = self.extras.watched(stage.name, watch, session)
        if setup.job.alone and case.id == METERED and not self.foreign.allocating:
            with meter(session.arena, torch_memory=True) as reading:
                session.prefill(hidden, step.history, hooks=hooks, guard=True)
            self._torch_memory(o, reading)
        else:
            session.prefill(hidden, step.history, hooks=hooks, guard=stage.name == "alias" and case.id in GUARDED)
        self.extras.replayed((stage.name, case.id, number))
        self._mappings(o, before, self._mapped(session))
        watch.finish()
        o.moved += gates_storage.moved(session.arena, stage.addresses)
        o.inputs_after = (whole_digest(raw(hidden)), *self._inputs(session))
        slack = stage.slack.damage()
        made = stage.tail.append(o, hidden) if step.rows else {}
        comm.barrier(f"{case.id} replayed")
        if step.restore:
            self._restore(stage, o)
        else:
            stage.seeded.appended(step)
        planted = self._planted(stage, case, step, data, made)
        return Taken(case, step, number, o, judge, hidden, planted, slack)

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
        rows = torch.from_numpy(data.hidden(step, 0, step.rows))
        return rows.to(TORCH_DTYPES[self.setup.job.formats.activation])

    def _judge_of(
        self, stage: Stage, case: Case, number: int, step: Replay, data: Data, counters: Counters, o: Observation
    ) -> Judge:
        setup = self.setup
        first, own = o.first_row, o.own
        audited = frozenset(row for row, owner in audited_rows(setup.profile, step, setup.job.seed) if owner == self.rank)
        lattice = frozenset(row for row in self._lattice(case, step) if first <= row < first + own)
        zero = data.zero_row(step)
        base = self.kept.get(("base", case.id, number)) if stage.name == "alias" else None
        plan = gates_select.Plan(
            audited, lattice, -1 if zero is None else zero, case.planted, None if base is None else base.local_ids
        )
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
        )
        judge.observation = o
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

    # -- judging

    def _judge(self, stage: Stage, taken: list[Taken], counters: dict[str, Counters], *, last: bool) -> None:
        for t in taken:
            self._tell(stage, t.case, t.number, "judge")
            self._judge_alone(stage, t, counters[t.case.id])
            kept = gates_pairs.keep(t.observation, self.setup.geometry.indexer.topk)
            if stage.name == "alias" and ("base", t.case.id, t.number) in self.kept:
                gates_pairs.arrangements(
                    self.sheets[t.case.id],
                    self.kept["base", t.case.id, t.number],
                    kept,
                    t.observation,
                    t.where,
                    own_order=self.foreign.selects,
                )
            self.kept[stage.name, t.case.id, t.number] = kept
            if t.case.equals:
                first = self.kept.get((stage.name, t.case.equals, 0))
                if first is not None:
                    gates_pairs.repeats(
                        self.sheets[t.case.id], first, kept, f"{stage.name} {t.where}", own_order=self.foreign.selects
                    )
            self._publish(stage, t, kept, counters[t.case.id])
            self.certificates += [{"case": t.case.id, "replay": t.number} | c for c in t.judge.certificates]
        self.comm.barrier("facts published")
        for t in taken:
            self._judge_together(stage, t, last=last and t.number == len(t.case.steps) - 1)
        self.comm.barrier("facts read")
        for t in taken:
            for path in (self._facts_file(stage, t, self.rank), self._partial_file(stage, t, self.rank)):
                path.unlink(missing_ok=True)

    def _judge_alone(self, stage: Stage, t: Taken, counters: Counters) -> None:
        """Gates that need only this rank's observation and the persistent bytes."""
        setup, sheet, o, where = self.setup, self.sheets[t.case.id], t.observation, f"{stage.name} {t.where}"
        profile = setup.profile
        views = len(setup.plans[stage.name].places)
        gates_storage.case_gates(sheet, o, views=views, slack=t.slack, tokens_rows=profile.rows, where=where)
        made = t.made or {cache: {} for cache in o.pages_before}
        gates_storage.persistence(sheet, o, made, page=profile.page, ranks=profile.ranks, rank=self.rank, where=where)
        gates_select.structure(sheet, o, setup.index_facts, profile.rows, where)
        gates_select.emitted(sheet, o, t.judge, profile.rows, where)
        first = o.first_row
        ids = o.array("ids", np.int32, profile.rows, setup.geometry.indexer.topk)
        counters.pads += int(np.count_nonzero(ids[first : first + profile.slice_rows] == -1))
        audited = tuple(row for row, _ in audited_rows(profile, t.step, setup.job.seed))
        gates_output.tail_gates(sheet, o, self.oracle, stage.tail, audited, where)
        gates_output.sanity(sheet, o, setup.output_facts, where)
        self.foreign.twins(sheet, o, where)
        self.extras.judged((stage.name, t.case.id, t.number), o, t.step, t.judge)
        if stage.name == "alias":
            counts = o.array("counts", np.int32, profile.rows)
            visible = o.history + np.arange(profile.rows) + 1
            self.facts.rows_selecting += int(
                np.count_nonzero((counts > 0) & (visible > counts) & (np.arange(profile.rows) < o.rows))
            )

    def _facts_file(self, stage: Stage, t: Taken, rank: int) -> Path:
        return self.folder / f"facts-{stage.name}-{t.case.id}-{t.number}-{rank}.json"

    def _partial_file(self, stage: Stage, t: Taken, rank: int) -> Path:
        return self.folder / f"partial-{stage.name}-{t.case.id}-{t.number}-{rank}.bin"

    def _publish(self, stage: Stage, t: Taken, kept: Kept, counters: Counters) -> None:
        facts = {
            "ids": kept.ids,
            "counts": kept.counts,
            "output": kept.output,
            "counters": counters.plain(),
            "events": self.extras.logs[stage.name, t.case.id, t.number],
        }
        self._facts_file(stage, t, self.rank).write_text(json.dumps(facts))
        self._partial_file(stage, t, self.rank).write_bytes(t.observation.copies["partial"].tobytes())

    def _judge_together(self, stage: Stage, t: Taken, *, last: bool) -> None:
        """Gates that need the other ranks' digests, counters and partial rows."""
        setup, sheet, where = self.setup, self.sheets[t.case.id], f"{stage.name} {t.where}"
        everyone = [json.loads(self._facts_file(stage, t, rank).read_text()) for rank in range(self.comm.size)]
        gates_pairs.agreement(sheet, everyone, where)
        self.extras.together((stage.name, t.case.id, t.number), [facts["events"] for facts in everyone])
        partials = [np.fromfile(self._partial_file(stage, t, rank), np.uint8) for rank in range(self.comm.size)]
        gates_output.reduced(sheet, t.observation, setup.output_facts, partials, where)
        if stage.name != "alias" or not last:
            return
        cards = [peer.card for peer in stage.caches.peers]
        pages = setup.profile.tokens // setup.profile.page
        gates_pairs.shard_map(sheet, cards, pages=pages, record=setup.record_bytes, page=setup.profile.page)
        found = self.facts.counters[t.case.id] = gates_select.total([facts["counters"] for facts in everyone])
        gates_select.minima(sheet, asdict(t.case.minima), found)

    def _seal(self, mapped: dict[str, list[Mapped]]) -> None:
        """The gates on plans and mappings, once both arrangements were prepared."""
        setup, sheet = self.setup, self.sheets[SEAL]
        views, pairs = setup.prepared.views, 0
        for name, plan in setup.plans.items():
            kinds = [p.kind for p in plan.places]
            pairs += sum(kinds.count(kind) * (kinds.count(kind) - 1) // 2 for kind in set(kinds))
            self.facts.logical[name] = plan.total
        segments = sum(len(plan.segments) for plan in setup.plans.values())
        for gate, units in (("S1", views), ("S2", views), ("S3", pairs), ("A1", 2), ("A2", segments + 1)):
            sheet.expect(gate, units)
        for name, plan in setup.plans.items():
            gates_storage.seal_plan(sheet, plan, setup.program, name)
        record = setup.record_bytes["index_cache"]
        gates_storage.saving(sheet, setup.plans["base"], setup.plans["alias"], requested=self.facts.requested, record=record)
        self.facts.mapped = gates_storage.mapped_bytes(sheet, mapped, setup.plans)
        self.extras.law()
        self.facts.lint_files = gates_storage.lint(sheet, Path(__file__).resolve().parent, self.rank, self.comm.size)
