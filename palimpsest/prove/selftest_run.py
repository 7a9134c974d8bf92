"""One mutant of the self-test: set it up, run it, and say which gates noticed.

A ``Bench`` makes a tiny checkpoint once and shares healthy runs. In-process ranks run on a profile of 512 tokens that keeps
every boundary of the case table; process mutants run on real ranks. ``main`` is the worker: mutant ids on stdin, one JSON
line each on stdout.
"""

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from palimpsest.checkpoint.make import make
from palimpsest.core.errors import PalimpsestError, RankError
from palimpsest.core.geometry import Formats
from palimpsest.kernels.call import Call, Chunk, Implementation
from palimpsest.prove import extras, liveness
from palimpsest.prove.cases import Profile
from palimpsest.prove.dedicated import Dedicated
from palimpsest.prove.extras import Extras, identity
from palimpsest.prove.gates import SEAL, Cell, Sheet, worse
from palimpsest.prove.mutants import BY_ID, Mutant
from palimpsest.prove.mutations import Injection
from palimpsest.prove.mutations_output import ACTIONS, PLANS, TOOLS, Flags, close
from palimpsest.prove.phase_lock import explain_fault
from palimpsest.prove.rank_main import Qualifier
from palimpsest.prove.rank_setup import Job, Setup
from palimpsest.prove.selftest_ranks import VICTIM
from palimpsest.ranks.comm import Comm
from palimpsest.ranks.local import run_local
from palimpsest.ranks.spawn import RankExit, spawn
from palimpsest.run.arena import Arena

TARGET = "palimpsest.prove.selftest_ranks:run"
#: a mutant that needs a process for itself runs in one: heap counters and torch's profiler are the process's
ALONE = "palimpsest.prove.selftest_run:alone"
TOKENS, ROWS, PAGE, TOPK, HEADS, LAYER, SEED = 512, 16, 16, 32, 4, 3, 11
#: seconds a real rank may stay in one phase; a stopped one is waited for that long
DEADLINE, STOPPED_DEADLINE = 90.0, 15.0
#: actions that real ranks end with an error: the words that name the cause, and the gate that stands for having been told
TOLD = {
    "killed": ("SIGKILL", "L1"),
    "raises": ("planted by the self-test", "L1"),
    "stopped": ("", "L2"),
    "other_source": ("same source", "L4"),
    "other_plan": ("same plan", "L4"),
    "early_read": ("SIGSEGV", "S7"),
}


class Parts(Extras):
    """The extra gates, of which a mutant runs only the parts it needs."""

    def __init__(self, setup: Setup, comm: Comm, sheets: dict[str, Sheet], parts: tuple[str, ...]):
        super().__init__(setup, comm, sheets)
        self.parts = parts

    def sealed(self, name: str, session: Any) -> None:
        if "views" in self.parts:
            super().sealed(name, session)

    def dedicated(self, session: Any, tell: Any, *, allocating: bool) -> None:
        made = Dedicated(self.setup, session, self.comm, self.sheets[SEAL], allocating=allocating)
        for part, run in (("locked", made._locked), ("probed", made._probed), ("soak", made._soak)):
            if part in self.parts:
                tell(part)
                self.comm.barrier(f"dedicated {part}")
                run()
        self.comm.barrier("dedicated done")

    def law(self) -> None:
        if "law" in self.parts:
            super().law()


class Mutated(Qualifier):
    """A rank's run with a mutant in it."""

    def __init__(self, comm: Comm, setup: Setup, mutant: Mutant, injection: Injection):
        self.injection, self.parts = injection, mutant.parts
        right = setup.filler()

        def filled(arena: Arena, its: Comm) -> None:
            right(arena, its)
            arrangement = "alias" if arena.plan.reuse == "on" else "base"
            injection.arenas[arrangement, comm.rank] = arena
            if injection.filled is not None:
                injection.filled(arrangement, arena, comm.rank)

        setup.filler = lambda: filled  # type: ignore[method-assign]
        super().__init__(comm, setup, lambda event: None, alter=self._altered if injection.wrap else None)
        self.extras = Parts(setup, comm, self.sheets, mutant.parts)
        if injection.made is not None:
            injection.made(self)

    def _altered(self, arrangement: str, known: dict[str, Implementation]) -> dict[str, Implementation]:
        return {op: self._wrapped(arrangement, op, run) for op, run in known.items()}

    def _wrapped(self, arrangement: str, op: str, run: Implementation) -> Implementation:
        wrap = self.injection.wrap
        assert wrap is not None

        def wrapped(call: Call, chunk: Chunk) -> None:
            wrap(arrangement, op, run, call, chunk)

        return wrapped

    def _seal(self, mapped: Any) -> None:
        if "seal" in self.parts:
            super()._seal(mapped)


@contextlib.contextmanager
def deleted(gates: frozenset[str]) -> Iterator[None]:
    """While it is open these gates find nothing and count everything: what a gate without a body would do."""
    fail, shut = Cell.fail, Cell.close

    def blind(self: Cell, units: int, message: str, verdict: str = "FAIL") -> None:
        if self.gate in gates:
            self.n_checked += units
        else:
            fail(self, units, message, verdict)

    def full(self: Cell) -> None:
        if self.gate in gates:
            self.n_checked = self.n_expected
        else:
            shut(self)

    with patch.object(Cell, "fail", blind), patch.object(Cell, "close", full):
        yield


class Bench:
    """Runs mutants in ``place``, a private folder. ``without``: gates whose body is deleted."""

    def __init__(self, place: Path, without: frozenset[str] = frozenset()):
        self.place, self.without = place, without
        self.model = make("tiny-k31", place / "model", overrides={"topk": TOPK, "heads": HEADS})
        self.stated = identity(Setup(self.job(BY_ID["OK1"])))
        self._healthy: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def job(self, mutant: Mutant) -> Job:
        """The job of a run, in a fresh private folder."""
        cases = mutant.cases if mutant.cases or mutant.argument == "all" else ("none",)
        work = Path(tempfile.mkdtemp(prefix="run-", dir=self.place))
        kernels = {op: f"palimpsest.prove.selftest_kernels:{op}" for op in mutant.kernels}
        return Job(
            model=str(self.model),
            layer=LAYER,
            profile=Profile("small", TOKENS, ROWS, mutant.ranks, PAGE),
            seed=SEED,
            engine="portable",
            formats=Formats(),
            workdir=str(work),
            alone=mutant.alone,
            only=cases,
            kernels=kernels,
        )

    def run(self, mutant: Mutant) -> dict[str, Any]:
        """``{"id", "verdicts": gate -> worst verdict, "why": gate -> first failure}``."""
        with deleted(self.without):
            flags = self._flags(mutant)
        verdicts: dict[str, str] = {}
        why: dict[str, str] = {}
        for flag in flags:
            gate = flag["gate"]
            verdicts[gate] = worse(verdicts.get(gate, "PASS"), flag["verdict"])
            if flag["verdict"] != "PASS":
                why.setdefault(gate, str(flag["first_failure"])[:240])
        return {"id": mutant.id, "verdicts": verdicts, "why": why}

    def _flags(self, mutant: Mutant) -> Flags:
        if mutant.kind == "plan":
            return PLANS[mutant.action](Setup(self.job(mutant)))
        if mutant.kind == "ranks":
            return self._real(mutant)
        if mutant.kind == "record":
            return self._record()
        if mutant.action == "wide_bound":
            return self._power()
        if mutant.kind == "tool":
            return TOOLS[mutant.action](Setup(self.job(mutant)), Path(tempfile.mkdtemp(dir=self.place)))
        if mutant.alone:
            return self._alone(mutant)
        if mutant.argument == "all":
            return [flag for result in self.healthy() for flag in result["flags"]]
        return [flag for result in self.layer(mutant, ACTIONS[mutant.action](mutant)) for flag in result["flags"]]

    def layer(self, mutant: Mutant, injection: Injection, job: Job | None = None) -> list[dict[str, Any]]:
        """The ranks' results. A rank that could not go on is one flag of no gate."""
        made = job or self.job(mutant)

        def delayed(rank: int, call: str, label: str) -> int:
            return 50 if rank == injection.late and call == "enter" and label == "p6" else 0

        def main(comm: Comm) -> dict[str, Any]:
            return Mutated(comm, Setup(made), mutant, injection).run()

        with contextlib.ExitStack() as stack:
            # one reading of the source for all ranks and runs: other programs may be editing it
            stack.enter_context(patch.object(extras, "identity", self._identity))
            for thing, name, value in injection.patches:
                stack.enter_context(patch.object(thing, name, value))
            try:
                return run_local(
                    made.profile.ranks, main, seed=mutant.seed, hooks=delayed if injection.late is not None else None
                )
            except PalimpsestError as error:
                return [{"flags": [{"gate": "stopped", "verdict": "ERROR", "first_failure": str(error)}]}]

    def _identity(self, setup: Setup) -> dict[str, str]:
        return {**self.stated, "plan": setup.digest}

    def _alone(self, mutant: Mutant) -> Flags:
        """The same in a real process of one rank."""
        config = {"id": mutant.id, "job": self.job(mutant).to_json(), "without": sorted(self.without)}
        try:
            (ended,) = spawn(1, ALONE, config, deadline_s=DEADLINE)
        except RankError as error:
            return [{"gate": "stopped", "verdict": "ERROR", "first_failure": str(error)}]
        return list(ended.value["flags"])

    def healthy(self) -> list[dict[str, Any]]:
        """A whole healthy run, made once."""
        if not self._healthy:
            mutant = BY_ID["OK1"]
            self._healthy[()] = self.layer(mutant, Injection(), self.job(mutant))
        return self._healthy[()]

    # -- real processes

    def _real(self, mutant: Mutant) -> Flags:
        made = self.job(mutant)
        deadline = STOPPED_DEADLINE if mutant.action == "stopped" else DEADLINE
        before = liveness.children(), liveness.open_things()
        left: list[int] = []

        def event(rank: int, value: Any) -> None:
            if mutant.action == "left_open" and not left:
                left.append(os.memfd_create("left"))

        config = {"job": made.to_json(), "action": mutant.action, "argument": mutant.argument}
        told: RankError | None = None
        ended: list[RankExit] = []
        try:
            ended = spawn(made.profile.ranks, TARGET, config, deadline_s=deadline, on_event=event)
        except RankError as error:
            told = error
        behind = liveness.left_behind(before, [rank.pid for rank in ended], Path(made.workdir))
        for fd in left:
            os.close(fd)
        if ended:
            stated = [rank.value["extras"]["identity"] for rank in ended]
            flags = liveness.cells(ended, stated, identity(Setup(made)), deadline_s=deadline, left=behind)
            return [dict(flag) for flag in flags]
        return _told(mutant, told, behind, Path(made.workdir))

    # -- records and power

    def _record(self) -> Flags:
        from palimpsest.prove.selftest_record import refusals

        mutant = BY_ID["OK1"]
        return refusals(self.job(mutant), self.healthy(), self.place)

    def _power(self) -> Flags:
        """O5: what the oracles betray with their bound ten times as wide, against what they betray with the derived one."""
        mutant = dataclasses.replace(BY_ID["M48"], cases=("C02",))

        def widened(qualifier: Qualifier) -> None:
            model = qualifier.setup.model
            qualifier.setup.model = dataclasses.replace(model, exp_eps=10 * model.exp_eps, sum_u=10 * model.sum_u)

        counts = []
        for injection in (Injection(), Injection(made=widened)):
            found: dict[str, int] = {}
            for result in self.layer(mutant, injection):
                for name, value in result["extras"]["power"]["C02"].items():
                    found[name] = found.get(name, 0) + value
            counts.append(found)
        sheet, (derived, wide) = Sheet(SEAL, 0), counts
        for name, value in derived.items():
            sheet.cell("O5").check(
                wide[name] >= value, 1, f"{name}: {wide[name]} with the wide bound, {value} with the derived one"
            )
        return close(sheet)


def _told(mutant: Mutant, error: RankError | None, behind: list[str], folder: Path) -> Flags:
    """L3, and the gate that stands for the error having named the rank, its phase and the cause."""
    words, gate = TOLD[mutant.action]
    sheet = Sheet(SEAL, 0)
    sheet.cell("L3").check(not behind, 1, behind[0] if behind else "")
    named = (
        error is not None
        and error.rank == VICTIM
        and words in str(error)
        and mutant.argument in ("", "source", "plan", error.phase)
    )
    if mutant.action == "early_read":
        named = named and "latent_history" in explain_fault(folder, VICTIM)
    if named:
        sheet.cell(gate).fail(1, str(error), "ERROR")
    else:
        sheet.cell(gate).passed(1)
    return [
        *close(sheet),
        *([] if named else [{"gate": "stopped", "verdict": "ERROR", "first_failure": f"not named as it was: {error}"}]),
    ]


def alone(comm: Comm, config: dict[str, Any], emit: Any) -> dict[str, Any]:
    """What the only rank of a process runs."""
    mutant, setup = BY_ID[config["id"]], Setup(Job.from_json(config["job"]))
    injection = ACTIONS[mutant.action](mutant)
    with contextlib.ExitStack() as stack:
        stack.enter_context(deleted(frozenset(config["without"])))
        for thing, name, value in injection.patches:
            stack.enter_context(patch.object(thing, name, value))
        return {"flags": Mutated(comm, setup, mutant, injection).run()["flags"]}


def main() -> int:
    """The worker: one mutant id a line on stdin, one JSON line a mutant on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="palimpsest-self-test-") as folder:
        bench = Bench(Path(folder))
        for line in sys.stdin:
            answers.write(json.dumps(bench.run(BY_ID[line.strip()])) + "\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
