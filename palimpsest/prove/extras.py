"""What one rank does beside the cases' own gates: the event log (S7), another process's view of its memory (S9, S10), oracle B
and its power (O3, O5), tie density, the capacity law (A5), replays of their own, and who this rank is (L4).
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from palimpsest import recipes
from palimpsest.core.canon import digest
from palimpsest.plan.place import place
from palimpsest.prove import capacity, density, events, gates_oracle, roundtrip
from palimpsest.prove.capture import Observation
from palimpsest.prove.cases import Case, Replay, audited_rows
from palimpsest.prove.dedicated import Dedicated
from palimpsest.prove.enclosure import follows
from palimpsest.prove.evidence import file_digest
from palimpsest.prove.gates import SEAL, Sheet
from palimpsest.prove.rank_setup import Setup
from palimpsest.prove.record import package_digest, package_root
from palimpsest.ranks.comm import Comm
from palimpsest.run.execute import Hooks, Session

#: (arrangement, case, replay)
Key = tuple[str, str, int]


def checkpoint_digest(setup: Setup) -> str:
    """One digest of what a checkpoint says it holds: config, tensor table, sizes of the files. The bytes themselves are
    digested by the parent."""
    root = setup.checkpoint.root
    tensors = {
        name: [ref.file, ref.dtype, list(ref.shape), ref.begin, ref.nbytes] for name, ref in setup.checkpoint.tensors.items()
    }
    sizes = {name: (root / name).stat().st_size for name in sorted({ref.file for ref in setup.checkpoint.tensors.values()})}
    return digest([file_digest(root / "config.json"), tensors, sizes])


def identity(setup: Setup) -> dict[str, str]:
    """What every rank and the parent must have in common."""
    return {"source": package_digest(package_root()), "plan": setup.digest, "checkpoint": checkpoint_digest(setup)}


class Extras:
    """The extra gates of one rank. ``sheets``: case -> its cells, ``SEAL`` among them."""

    def __init__(self, setup: Setup, comm: Comm, sheets: dict[str, Sheet]):
        self.setup, self.comm, self.sheets, self.rank = setup, comm, sheets, comm.rank
        self.schedules = {name: events.Schedule.of(setup.program, plan) for name, plan in setup.plans.items()}
        self.logged = {name: events.LoggedComm(comm) for name in setup.plans}
        self.logs: dict[Key, list[events.Event]] = {}
        self.lines: list[dict[str, Any]] = []
        self.power: dict[str, dict[str, int]] = {}
        self.density: dict[str, dict[str, int]] = {}
        self.mapped: dict[str, dict[str, int]] = {}
        self._epoch = 0
        self.identity = identity(setup)

    def agree(self) -> None:
        """Before the first case: every rank has the same source, plans, cases and checkpoint. Raises RankError naming one that
        differs."""
        for name, value in self.identity.items():
            self.comm.agree(f"same {name}", value)

    def expect(self, case: Case) -> None:
        """Expectations of S7, O3 and O5 in one case."""
        sheet, n = self.sheets[case.id], len(case.steps)
        sheet.expect("S7", n * sum(s.units(self.comm.size) for s in self.schedules.values()))
        audited = sum(len(self._audited(step)) for step in case.steps)
        f = self.setup.output_facts
        if follows(f.model):
            sheet.expect("O3", audited * f.heads * f.layout.kv_lora)
        sheet.expect("O5", audited)

    def _audited(self, step: Replay) -> tuple[int, ...]:
        """Audited rows of this rank's slice."""
        return tuple(row for row, owner in audited_rows(self.setup.profile, step, self.setup.job.seed) if owner == self.rank)

    # -- around the replays

    def sealed(self, name: str, session: Session) -> None:
        """S9, S10 and the static part of S7 of one arrangement."""
        sheet, arena, schedule = self.sheets[SEAL], session.arena, self.schedules[name]
        views = [p for p in arena.plan.places if p.nbytes]
        sheet.expect("S9", len(views) + len(arena.plan.overlaps))
        sheet.expect("S10", sum(p.kind in roundtrip.APART for p in views))
        sheet.expect("S7", len(schedule.pairs))
        roundtrip.compare(sheet, arena, roundtrip.ask(roundtrip.describe(arena)), name)
        roundtrip.independence(sheet, arena, name)
        events.static(sheet, self.setup.program, schedule, name)

    def watched(self, name: str, hooks: Hooks, session: Session) -> Hooks:
        """The hooks of a replay, with the event log around them; what was logged before is dropped."""
        self.logged[name].take()
        return events.Logged(hooks, self.logged[name], session.arena)

    def replayed(self, key: Key) -> None:
        """Keep what the replay logged."""
        name, case, number = key
        self.logs[key] = self.logged[name].take()
        line = {
            "case": case,
            "arrangement": name,
            "replay": number,
            "epoch": self._epoch,
            "rank": self.rank,
            "events": self.logs[key],
        }
        self.lines.append(line)
        self._epoch += 1

    def judged(self, key: Key, o: Observation, step: Replay, judge: Any) -> None:
        """O3, O5 and the density of one replay of the aliased arrangement."""
        name, case, number = key
        if name != "alias":
            return
        where, seed = f"{name} replay {number}", self.setup.job.seed
        found = gates_oracle.oracle_b(self.sheets[case], o, self.setup.output_facts, self._audited(step), seed=seed, where=where)
        _add(self.power.setdefault(case, gates_oracle.empty_power()), found)
        counted = getattr(judge, "density", None)
        _add(self.density.setdefault(case, density.Density().plain()), counted.plain() if counted is not None else {})

    def together(self, key: Key, logs: list[list[events.Event]]) -> None:
        """The dynamic part of S7 of one replay."""
        name, case, number = key
        events.dynamic(self.sheets[case], self.schedules[name], logs, self.rank, f"{name} replay {number}")

    # -- once

    def dedicated(self, session: Session, tell: Callable[[str], None], *, allocating: bool) -> None:
        """Replays of their own in the aliased arrangement."""
        Dedicated(self.setup, session, self.comm, self.sheets[SEAL], allocating=allocating).run(tell)

    def law(self) -> None:
        """A5, on rank 0: planning is the same everywhere."""
        if self.rank:
            return
        setup, sheet = self.setup, self.sheets[SEAL]
        for tokens in capacity.lengths(setup.geometry.indexer.topk):
            limits = replace(setup.profile.limits, tokens=tokens, rows=min(setup.profile.rows, tokens))
            program = recipes.program(setup.geometry, limits, setup.job.formats, setup.job.layer)
            plans = {"base": place(program, "off"), "alias": place(program, "on")}
            sheet.expect("A5", capacity.law_units(len(plans["alias"].segments)))
            records = setup.record_bytes["index_cache"], setup.record_bytes["latent_cache"]
            self.mapped[str(tokens)] = capacity.law(sheet, program, plans, records=records)

    def result(self) -> dict[str, Any]:
        """What the parent needs: event lines, and the rank's facts."""
        said = {**self.identity, "pid": os.getpid(), "deadline_s": str(float(getattr(self.comm, "deadline_s", 0)))}
        return {
            "events": self.lines,
            "extras": {"identity": said, "power": self.power, "density": self.density, "capacity": self.mapped},
        }


def _add(into: dict[str, int], more: dict[str, int]) -> None:
    for name, value in more.items():
        into[name] += int(np.int64(value))
