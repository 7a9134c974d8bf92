"""Replays of their own, after the cases of the aliased arrangement: under the phase lock and the epoch shadow (S7, S8), with
exact probes (O4), and a soak under a cap (A4, A6). They are judged by what they show themselves and change nothing the cases
found.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palimpsest.core.spec import Step
from palimpsest.kernels.call import TORCH_DTYPES, Call, Chunk
from palimpsest.prove import capacity, fill
from palimpsest.prove.cases import Case, Replay, audited_rows, cases, records_of
from palimpsest.prove.gates import Sheet
from palimpsest.prove.phase_lock import NOTE, FaultNote, PhaseLock
from palimpsest.prove.probes import Probe
from palimpsest.prove.rank_setup import Setup
from palimpsest.prove.shadow import Shadow, reads_of
from palimpsest.prove.spill import Spill
from palimpsest.prove.turns import InTurn, turns_of
from palimpsest.ranks.comm import Comm
from palimpsest.run.execute import Hooks, Session

#: cases whose first replay is repeated under the lock and the shadow: full rows at the limit, and ranks without rows
LOCKED = ("C03", "C05")
#: the case whose sizes the probes take
PROBED = "C03"


class Chain:
    """Several hooks, in order before a step and in reverse after it."""

    def __init__(self, *hooks: Hooks):
        self.hooks = hooks

    def before(self, step: Step, call: Call, chunk: Chunk) -> None:
        for hooks in self.hooks:
            hooks.before(step, call, chunk)

    def after(self, step: Step, call: Call, chunk: Chunk) -> None:
        for hooks in reversed(self.hooks):
            hooks.after(step, call, chunk)

    def tap(self, step: Step, event: str, **data: Any) -> None:
        for hooks in self.hooks:
            hooks.tap(step, event, **data)


@dataclass
class ProbeHooks:
    """Plants the probe's records and queries, and copies what attention was given and gave."""

    session: Session
    probe: Probe
    rank: int
    step: Replay
    audited: tuple[int, ...]
    ids: dict[int, np.ndarray] = field(default_factory=dict)
    context: dict[int, np.ndarray] = field(default_factory=dict)

    def before(self, step: Step, call: Call, chunk: Chunk) -> None:
        """Everything happens after a step."""

    def after(self, step: Step, call: Call, chunk: Chunk) -> None:
        arena = self.session.arena
        if step.name == "append_latent":
            plant(self.session, self.probe, self.rank, self.step.history, self.step.visible)
        elif step.name == "attention_query":
            view = arena.view("query")
            activation = str(dict(self.session.program.facts)["activation"])
            view[: chunk.rows].copy_(self.probe.query(chunk.rows, view.shape[1], activation))
        elif step.name == "sparse_attend":
            ids, counts, context = (arena.view(name).numpy() for name in ("ids", "counts", "context"))
            for row in self.audited:
                self.ids[row], self.context[row] = ids[row, : max(0, counts[row])].astype(np.int64), context[row].copy()

    def tap(self, step: Step, event: str, **data: Any) -> None:
        """Nothing to see in events."""


def plant(session: Session, probe: Probe, rank: int, start: int, stop: int) -> None:
    """Write the probe's records of tokens [start, stop) that ``rank`` owns."""
    batch = 8192
    for first in range(start, stop, batch):
        end = min(first + batch, stop)
        fill.put_records(session.arena, "latent_cache", rank, first, [probe.records(first, end)])


class Dedicated:
    """The replays of one rank. ``sheet`` is the seal's."""

    def __init__(self, setup: Setup, session: Session, comm: Comm, sheet: Sheet, *, allocating: bool = False):
        self.setup, self.session, self.comm, self.sheet, self.rank = setup, session, comm, sheet, comm.rank
        self.allocating = allocating
        self.spill, self.turns = Spill(Path(setup.job.workdir)), turns_of(setup, comm)
        table = cases(setup.profile, setup.geometry.indexer.topk, records_of(setup.geometry, setup.job.formats))
        self.table: dict[str, Case] = {case.id: case for case in table}

    def run(self, tell: Callable[[str], None]) -> None:
        """All parts, or those that ``job.only`` names (``lock``, ``probe``, ``soak``) when it names anything."""
        only = self.setup.job.only
        parts = (("lock", self._locked), ("probe", self._probed), ("soak", self._soak))
        for name, part in (p for p in parts if not only or p[0] in only):
            tell(name)
            self.comm.barrier(f"dedicated {name}")
            part()
        self.comm.barrier("dedicated done")

    def _hidden(self, case: Case, step: Replay) -> torch.Tensor:
        rows = torch.from_numpy(self.setup.data(case).hidden(step, 0, step.rows))
        return rows.to(TORCH_DTYPES[self.setup.job.formats.activation])

    # -- S7 under the lock, S8

    def _locked(self) -> None:
        lock, shadow = PhaseLock.of(self.session), Shadow.of(self.session.arena, self.rank, self.spill)
        reusable = frozenset(p.buffer for p in self.session.plan.places if p.kind == "reusable")
        expected = reads_of(self.session.program, reusable)
        s7, s8 = self.sheet.cell("S7"), self.sheet.cell("S8")
        for epoch, name in enumerate(LOCKED, 1):
            case = self.table[name]
            step = case.steps[0]
            self.sheet.expect("S7", lock.checks + 1)
            self.sheet.expect("S8", expected)
            shadow.begin(epoch)
            lock.closed.clear()
            with self.turns.turn():
                hidden = self._hidden(case, step)
            with lock, self._noted(lock):
                self.session.prefill(hidden, step.history, hooks=InTurn(Chain(lock, shadow), self.turns))
                # nobody else may still be reading through a mapping that opens again
                self.comm.barrier(f"locked {name}")
            for (view, where), closed in lock.closed.items():
                s7.check(closed, 1, f"locked {name}: the mapping of {view} was open when {where} began")
            s7.passed(1)
            first = shadow.faults[0] if shadow.faults else ""
            s8.check(not shadow.faults, shadow.reads, f"shadowed {name}: {first}", shadow.nbytes)

    def _noted(self, lock: PhaseLock) -> Any:
        """The fault note, where a signal handler is this rank's own."""
        from contextlib import nullcontext

        path = Path(self.setup.job.workdir) / NOTE.format(rank=self.rank)
        return FaultNote(path, lock) if self.setup.job.alone else nullcontext()

    # -- O4

    def _probed(self) -> None:
        setup, case = self.setup, self.table[PROBED]
        step, facts = case.steps[0], setup.output_facts
        audited = tuple(row for row, _ in audited_rows(setup.profile, step, setup.job.seed))
        features = facts.heads * facts.layout.kv_lora
        cell = self.sheet.cell("O4")
        self.sheet.expect("O4", len(audited) * features)
        probe = Probe(setup.job.seed, facts.layout, setup.index_facts.alias_end, facts.softmax_scale)
        if not probe.usable:
            cell.fail(
                len(audited) * features,
                f"records are scaled by {facts.layout.scale!r}, no power of two: sums of signs are not exact",
                "INCONCLUSIVE",
            )
            return
        with self.turns.turn():
            plant(self.session, probe, self.rank, 0, step.history)
        self.comm.barrier("probe planted")
        hooks = ProbeHooks(self.session, probe, self.rank, step, audited)
        with self.turns.turn():
            hidden = self._hidden(case, step)
        self.session.prefill(hidden, step.history, hooks=InTurn(hooks, self.turns))
        for row in audited:
            bad = probe.faults(row, hooks.ids[row], hooks.context[row])
            text = f"probe {PROBED} row {row}: {bad} of {features} coordinates are not what its {len(hooks.ids[row])} ids give"
            cell.check(not bad, features, text, hooks.context[row].nbytes)

    # -- A4, A6

    def _soak(self) -> None:
        self.sheet.expect("A4", capacity.CAP_UNITS)
        self.sheet.expect("A6", capacity.SOAK_REPLAYS + 1)
        chunks = self._chunks()

        def replay(number: int) -> None:
            hidden, history = chunks[number % len(chunks)]
            self.session.prefill(hidden, history)

        soak = capacity.Soak(self.session.arena, replay, self.comm.barrier, len(chunks), self.setup.job.alone, self.allocating)
        soak.run(self.sheet)

    def _chunks(self) -> list[tuple[torch.Tensor, int]]:
        """Small mixed requests: empty, one row, a slice and a row more, at short histories and, once, at the last token."""
        p, topk = self.setup.profile, self.setup.geometry.indexer.topk
        sizes = [
            (0, 1),
            (topk - 1, 1),
            (topk, p.slice_rows + 1),
            (2 * topk + 1, 0),
            (1, 2),
            (p.tokens - 1, 1),
            (p.page - 1, p.slice_rows),
            (p.page, 3),
        ]
        width, dtype = self.setup.geometry.hidden, TORCH_DTYPES[self.setup.job.formats.activation]
        rng = torch.Generator().manual_seed(self.setup.job.seed)
        return [(torch.randn((rows, width), generator=rng).to(dtype), history) for history, rows in sizes if rows <= p.rows]
