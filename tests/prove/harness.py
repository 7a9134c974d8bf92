"""A small layer on in-process ranks, with mutants: for the tests that show that each gate can fail."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palimpsest.checkpoint.make import make
from palimpsest.core.geometry import Formats
from palimpsest.kernels.call import Call, Chunk, Implementation
from palimpsest.prove import liveness
from palimpsest.prove.cases import Profile
from palimpsest.prove.extras import identity
from palimpsest.prove.rank_main import Qualifier
from palimpsest.prove.rank_setup import Job, Setup
from palimpsest.ranks.local import run_local
from palimpsest.ranks.spawn import RankExit

#: 2 ranks, 16 rows, 512 tokens: every boundary of the table exists and a case takes about a second
TINY = Profile("small", 512, 16, 2, 16)

#: (arrangement, op, implementation, call, chunk) -> runs the step, well or badly
Mutant = Callable[[str, str, Implementation, Call, Chunk], None]


def job(tmp_path: Path, *only: str, profile: Profile = TINY, **changes: Any) -> Job:
    """A job on a fresh private folder and a tiny-k31 checkpoint with top-k 32."""
    model, work = tmp_path / "model", tmp_path / "work"
    if not model.exists():
        make("tiny-k31", model, overrides={"topk": 32, "heads": 4})
    work.mkdir(exist_ok=True)
    values = {"layer": 3, "profile": profile, "seed": 11, "engine": "portable", "formats": Formats(), "alone": False}
    return Job(model=str(model), workdir=str(work), only=only, **values | changes)


def qualify_locally(made: Job, mutant: Mutant | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """The ranks' results; ``mutant`` wraps every step."""
    parsed = Job.from_json(json.loads(json.dumps(made.to_json())))

    def alter(arrangement: str, known: dict[str, Implementation]) -> dict[str, Implementation]:
        return {op: _wrapped(arrangement, op, run, mutant) for op, run in known.items()} if mutant else known

    return run_local(
        made.profile.ranks, lambda comm: Qualifier(comm, Setup(parsed), lambda e: None, alter=alter).run(), seed=seed
    )


def with_parent(made: Job, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In-process results with the cells a parent of real ranks adds, as if each rank had been a process of its own."""
    ended = []
    for rank, result in enumerate(results):
        result["extras"]["identity"] |= {"pid": 1000 + rank, "deadline_s": "120.0"}
        ended.append(RankExit(rank, 1000 + rank, result))
    stated = [result["extras"]["identity"] for result in results]
    for flag in liveness.cells(ended, stated, identity(Setup(made)), deadline_s=120.0, left=[]):
        results[int(str(flag["rank"]))]["flags"].append(flag)
    return results


def _wrapped(arrangement: str, op: str, run: Implementation, mutant: Mutant) -> Implementation:
    def wrapped(call: Call, chunk: Chunk) -> None:
        mutant(arrangement, op, run, call, chunk)

    return wrapped


def verdicts(results: list[dict[str, Any]]) -> dict[str, str]:
    """Gate -> its worst verdict over all cells."""
    order = ("PASS", "INCONCLUSIVE", "FAIL", "ERROR")
    found: dict[str, str] = {}
    for result in results:
        for flag in result["flags"]:
            found[flag["gate"]] = max(found.get(flag["gate"], "PASS"), flag["verdict"], key=order.index)
    return found


def failing(results: list[dict[str, Any]]) -> set[str]:
    """Gates with a cell that did not pass."""
    return {gate for gate, verdict in verdicts(results).items() if verdict != "PASS"}
