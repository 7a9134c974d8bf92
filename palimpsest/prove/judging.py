"""The judging half of a rank's qualification: what is asked of a replay once it is over, alone and together with the other ranks.

``rank_main.Qualifier`` prepares and replays; this is its base class.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palimpsest.prove import fill, gates_output, gates_pairs, gates_select, gates_storage
from palimpsest.prove.capture import Bytes, Observation
from palimpsest.prove.cases import Case, Replay, audited_rows
from palimpsest.prove.extras import Extras
from palimpsest.prove.foreign_run import ForeignRun
from palimpsest.prove.gates import SEAL, Sheet
from palimpsest.prove.gates_pairs import Kept
from palimpsest.prove.gates_select import Judge
from palimpsest.prove.latents import LatentFile
from palimpsest.prove.peers import Caches
from palimpsest.prove.rank_setup import Setup
from palimpsest.prove.scores import ScoreLog
from palimpsest.prove.tail import Tail
from palimpsest.prove.turns import Turns
from palimpsest.prove.verdicts import Counters, total
from palimpsest.ranks.comm import Comm
from palimpsest.run.execute import Session
from palimpsest.run.guards import SlackCanaries
from palimpsest.run.meters import Mapped


@dataclass
class Taken:
    """One replay waiting to be judged."""

    case: Case
    step: Replay
    number: int
    observation: Observation
    judge: Judge
    hidden: torch.Tensor
    latents: LatentFile
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
    phases: dict[str, int] = field(default_factory=dict)
    lint_files: int = 0
    torch_peak: int = 0


class Judging:
    """What a rank shares between its replays, and the gates on one."""

    comm: Comm
    setup: Setup
    rank: int
    folder: Path
    facts: Facts
    certificates: list[dict[str, Any]]
    sheets: dict[str, Sheet]
    kept: dict[tuple[str, str, int], Kept]
    oracle: gates_output.Oracle
    foreign: ForeignRun
    extras: Extras
    turns: Turns
    _tell: Callable[[Stage, Case, int, str], None]

    def _judge(self, stage: Stage, taken: list[Taken], counters: dict[str, Counters], *, last: bool) -> None:
        for t in taken:
            self._tell(stage, t.case, t.number, "judge")
            with self.turns.turn():
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
            with self.turns.turn():
                self._judge_together(stage, t, last=last and t.number == len(t.case.steps) - 1)
        self.comm.barrier("facts read")
        for t in taken:
            self._facts_file(stage, t, self.rank).unlink(missing_ok=True)
            self._partial_file(stage.name, t.case.id, t.number, self.rank).unlink(missing_ok=True)
            if not self.rank:
                t.latents.remove()

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

    def _partial_file(self, stage: str, case: str, number: int, rank: int) -> Path:
        return self.folder / f"partial-{stage}-{case}-{number}-{rank}"

    def _publish(self, stage: Stage, t: Taken, kept: Kept, counters: Counters) -> None:
        facts = {
            "ids": kept.ids,
            "counts": kept.counts,
            "output": kept.output,
            "counters": counters.plain(),
            "events": self.extras.logs[stage.name, t.case.id, t.number],
        }
        self._facts_file(stage, t, self.rank).write_text(json.dumps(facts))

    def _partials(self, stage: Stage, t: Taken) -> list[Bytes]:
        """Every rank's partial rows [rows, bytes]."""
        if not t.step.rows:
            return []
        paths = [self._partial_file(stage.name, t.case.id, t.number, rank) for rank in range(self.comm.size)]
        return [np.memmap(path, np.uint8, "r").reshape(t.step.rows, -1) for path in paths]

    def _judge_together(self, stage: Stage, t: Taken, *, last: bool) -> None:
        """Gates that need the other ranks' digests, counters and partial rows."""
        setup, sheet, where = self.setup, self.sheets[t.case.id], f"{stage.name} {t.where}"
        everyone = [json.loads(self._facts_file(stage, t, rank).read_text()) for rank in range(self.comm.size)]
        gates_pairs.agreement(sheet, everyone, where)
        self.extras.together((stage.name, t.case.id, t.number), [facts["events"] for facts in everyone])
        partials = self._partials(stage, t)
        gates_output.reduced(sheet, t.observation, setup.output_facts, partials, where)
        if stage.name != "alias" or not last:
            return
        cards = [peer.card for peer in stage.caches.peers]
        pages = setup.profile.tokens // setup.profile.page
        gates_pairs.shard_map(sheet, cards, pages=pages, record=setup.record_bytes, page=setup.profile.page)
        found = self.facts.counters[t.case.id] = total([facts["counters"] for facts in everyone])
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
