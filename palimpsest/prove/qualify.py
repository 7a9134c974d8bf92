"""The parent of a qualification: resolve the model, check it, start the ranks, gather what they found, write the evidence.

The parent judges nothing. It forms the verdict from the ranks' cells by the algebra of ``gates.py``; ``verify`` forms it again
from the files.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palimpsest.core.errors import BadCheckpoint, BadConfig, RankError, Unsupported
from palimpsest.core.geometry import Formats, Geometry
from palimpsest.kernels.detect import choose_engine
from palimpsest.kernels.table import compile_engine
from palimpsest.prove import foreign, liveness
from palimpsest.prove import record as facts
from palimpsest.prove.assemble import assemble
from palimpsest.prove.cases import PROFILES, Profile, profile
from palimpsest.prove.evidence import EvidenceFolder, new_run_id, previous_digest, utc_stamp
from palimpsest.prove.extras import identity
from palimpsest.prove.gates import UNLICENSED
from palimpsest.prove.licence import Licence, find
from palimpsest.prove.phase_lock import explain_fault
from palimpsest.prove.rank_setup import Job, Setup

if TYPE_CHECKING:
    from palimpsest.ranks.spawn import RankExit

#: what a run without a model qualifies: the preset of its profile
DEFAULT_PRESETS = {"full": "k31-pro-layer3"}
DEFAULT_PRESET = "tiny-k31"
DEFAULT_RANKS = 4
SEED = 20261201
#: seconds a rank may stay in one phase, by profile: a bound against hangs, not a speed promise
DEADLINES = {"small": 120.0, "wide": 600.0, "full": 3600.0}

#: called with one JSON event of a rank
Progress = Callable[[int, Mapping[str, Any]], None]
#: called with (done, total, what comes next) while kernels are compiled
Compiling = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Request:
    """What to qualify.

    model:  checkpoint folder, or None for one that is made and removed: tiny, or (full profile) of Kimi K3.1-Pro's real sizes
    layer:  0-based, or None for the first layer that runs an indexer
    ranks:  None for the profile's own number (the tiny default uses 4)
    engine: None for portable, and in the full profile for the fastest here
    environment: allow-listed values and one digest of it go into the record
    self_test, cache: a kill matrix, and the folder where one is looked for otherwise (gate V4)
    kernels: foreign implementations, ``OP=module:function`` each; their code is imported here and in every rank
    """

    model: Path | None = None
    layer: int | None = None
    profile: str = "small"
    ranks: int | None = None
    seed: int = SEED
    engine: str | None = None
    evidence: Path = Path("evidence")
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    self_test: Path | None = None
    cache: Path | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a run found: ``record`` is record.json's value, ``flags`` the lines of flags.jsonl, ``folder`` the evidence."""

    record: dict[str, Any]
    flags: list[dict[str, Any]]
    folder: Path

    @property
    def passed(self) -> bool:
        """Every gate passed. The recorded verdict can still be capped, by uncommitted source."""
        return self.record["gates_verdict"] == "PASS"


def qualify(request: Request, progress: Progress | None = None, compiling: Compiling | None = None) -> Outcome:
    """Run all cases in both arrangements on real rank processes and publish the evidence.

    Raises UserError for what is wrong before anything ran (unknown profile, incomplete checkpoint, impossible ranks, full disk).
    A rank that dies or hangs is published as a record with verdict ERROR and then raised as RankError.
    """
    started = time.monotonic_ns()
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="palimpsest-qualify-")))
        setup = prepare_setup(request, request.model if request.model is not None else _made(request.profile, private), private)
        # once here instead of in every rank at the same time
        compile_engine(setup.job.engine, compiling)
        folder = stack.enter_context(EvidenceFolder(request.evidence, new_run_id()))
        log = folder.work / "log.txt"
        failure: RankError | None = None
        before = Before.now(setup)
        results: list[Any] = []
        try:
            results = gather(setup, _run(setup, log, progress), before)
        except RankError as error:
            if error.exit_code != 1:
                raise  # a rank found the input wrong: nothing was proved or disproved
            failure = explained(error, Path(setup.job.workdir))
        outcome = publish(folder, setup, results, request=request, elapsed_ns=time.monotonic_ns() - started, failure=failure)
        if failure is not None:
            failure.args = (f"{failure}; recorded in {outcome.folder}",)
            raise failure
        return outcome


def publish(
    folder: EvidenceFolder,
    setup: Setup,
    results: list[Any],
    *,
    request: Request,
    elapsed_ns: int,
    failure: RankError | None = None,
) -> Outcome:
    """Write record, flags and certificates of a run beside its log, and publish the folder."""
    stamp = utc_stamp()
    tree, flags, certificates = assemble(
        setup, results, run_id=folder.run_id, source=facts.source_facts(), synthetic=request.model is None, elapsed_ns=elapsed_ns,
        failure=None if failure is None else str(failure),
    )  # fmt: skip
    environment, environment_digest = facts.environment_facts(request.environment or {})
    licence = licence_of(request, tree["source"]["package_digest"]) if results else None
    if licence is not None:
        flags += licence.flags
        folder.write(licence.FILE, licence.raw)
    events = sorted((line for r in results for line in r["events"]), key=_event_order)
    folder.write_lines("flags.jsonl", flags)
    folder.write_lines("events.jsonl", events)
    folder.write_lines("ties.jsonl", certificates)
    if not (folder.work / "log.txt").exists():
        folder.write("log.txt", "")
    tree |= {
        "started_utc": stamp,
        "argv": [_relative(word) for word in request.argv],
        "cwd_rel": ".",
        "env": environment,
        "env_digest": environment_digest,
        "previous": previous_digest(request.evidence, setup.plans["alias"].digest),
        "self_test": None if licence is None else licence.digest,
        "gates_absent": [*tree["gates_absent"], *(UNLICENSED if licence is None else ())],
        "events": {"file": "events.jsonl", "sha256": folder.digest("events.jsonl"), "lines": len(events)},
        "flags": {"file": "flags.jsonl", "sha256": folder.digest("flags.jsonl"), "cells": len(flags)},
    }
    folder.write_lines("record.json", [tree])
    return Outcome(tree, flags, folder.publish())


def explained(failure: RankError, folder: Path) -> RankError:
    """A rank that died under the phase lock left the name of the view it touched."""
    note = explain_fault(folder, failure.rank)
    if not note:
        return failure
    return RankError(f"{failure.message}; {note}", rank=failure.rank, phase=failure.phase)


def _event_order(line: Mapping[str, Any]) -> tuple[str, str, int, int]:
    return line["case"], line["arrangement"], line["replay"], line["rank"]


def licence_of(request: Request, package_digest: str) -> Licence | None:
    """The self-test record that licenses this source, or None: named by the caller, or found in the user's cache folder."""
    return Licence.of(find(request.self_test, request.cache), package_digest)


@dataclass(frozen=True)
class Before:
    """What there was when the ranks were started: the parent's children, its sockets and memory files, and who every rank must
    be.
    """

    children: set[int]
    things: set[str]
    identity: dict[str, str]

    @classmethod
    def now(cls, setup: Setup) -> "Before":
        return cls(liveness.children(), liveness.open_things(), identity(setup))


def gather(setup: Setup, ended: "list[RankExit]", before: "Before") -> list[Any]:
    """What the ranks returned, with the parent's own cells (L1-L4) beside theirs."""
    results = [rank.value for rank in ended]
    left = liveness.left_behind((before.children, before.things), [rank.pid for rank in ended], Path(setup.job.workdir))
    stated = [result["extras"]["identity"] for result in results]
    flags = liveness.cells(ended, stated, before.identity, deadline_s=DEADLINES[setup.profile.name], left=left)
    for flag in flags:
        results[int(str(flag["rank"]))]["flags"].append(flag)
    return results


def _relative(word: str) -> str:
    """A word of the command line; an absolute path loses what lies above the working directory."""
    return facts.relative_folder(Path(word)) if word.startswith("/") else word


def _made(profile: str, private: Path) -> Path:
    from palimpsest.checkpoint.make import make

    preset = DEFAULT_PRESETS.get(profile, DEFAULT_PRESET)
    return make(preset, private / preset)


def prepare_setup(request: Request, model: Path, private: Path) -> Setup:
    """Everything that can be wrong without running: preflight, layer, sizes, plans. ``private`` gets the ranks' folder. Raises
    UserError.
    """
    kernels = foreign.parse(request.kernels)
    foreign.load_all(kernels)
    geometry, formats = examine(model)
    layer = request.layer if request.layer is not None else geometry.full_layers[0]
    sizes = choose_profile(request, geometry)
    work = private / "ranks"
    work.mkdir(mode=0o700)
    job = Job(
        model=str(model.resolve()),
        layer=layer,
        profile=sizes,
        seed=request.seed,
        engine=choose_engine(request.engine if request.engine is not None or request.profile == "full" else "portable"),
        formats=formats,
        workdir=str(work),
        alone=True,
        kernels=kernels,
    )
    return Setup(job)


def examine(model: Path) -> tuple[Geometry, Formats]:
    """Geometry and stored formats of a checkpoint that passes preflight. Raises BadCheckpoint with the first finding."""
    from palimpsest import recipes
    from palimpsest.checkpoint.index import open_checkpoint
    from palimpsest.checkpoint.preflight import WeightNames, preflight

    checkpoint = open_checkpoint(model)
    geometry = recipes.geometry_from_config(dict(checkpoint.config), checkpoint.root.name)
    prefix = recipes.resolve_prefix(geometry, checkpoint.tensors)
    names = WeightNames.of(
        geometry, lambda g, n: recipes.attention_tensors(g, n, prefix), lambda g, n: recipes.forbidden_tensors(g, n, prefix)
    )  # fmt: skip
    report = preflight(checkpoint, geometry, names)
    if report.errors:
        raise BadCheckpoint(
            f"{model}: {len(report.errors)} preflight errors, the first is {report.errors[0]}; run: palimpsest preflight {model}"
        )
    if not geometry.full_layers:
        raise Unsupported(f"{geometry.name} has no layer that selects by itself, so there is nothing to qualify")
    return geometry, recipes.default_formats(geometry)


def choose_profile(request: Request, geometry: Geometry) -> Profile:
    """The profile at the wanted rank count. Raises BadConfig when it cannot hold the model."""
    if request.profile not in PROFILES:
        return profile(request.profile)
    base = PROFILES[request.profile]
    made_tiny = request.model is None and request.profile not in DEFAULT_PRESETS
    ranks = request.ranks if request.ranks is not None else min(base.ranks, DEFAULT_RANKS) if made_tiny else base.ranks
    if ranks < 1 or ranks & (ranks - 1) or geometry.heads % ranks:
        fitting = [n for n in (1, 2, 4, 8, 16, 32, 64) if geometry.heads % n == 0]
        raise BadConfig(
            f"{ranks} ranks do not fit the {geometry.heads} heads of {geometry.name}; use a power of two that divides them: "
            f"--ranks {', '.join(map(str, fitting))}"
        )
    found = replace(base, ranks=ranks)
    if geometry.indexer.topk > found.tokens // 4:
        raise BadConfig(
            f"top-k {geometry.indexer.topk} of {geometry.name} exceeds a quarter of the {found.tokens} "
            f"tokens of profile {found.name}; "
            "use --profile wide"
        )
    return found


def _run(setup: Setup, log: Path, progress: Progress | None) -> list["RankExit"]:
    from palimpsest.ranks.spawn import spawn

    deadline = DEADLINES[setup.profile.name]
    return spawn(
        setup.profile.ranks,
        "palimpsest.prove.rank_main:run_rank",
        setup.job.to_json(),
        deadline_s=deadline,
        log=log,
        on_event=progress,
    )
