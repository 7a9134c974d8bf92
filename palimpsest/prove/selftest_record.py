"""M46 of the self-test: a healthy record, published, then edited as a forger would; the record checker must refuse each."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palimpsest.core.canon import canonical
from palimpsest.core.errors import EvidenceError
from palimpsest.prove import liveness
from palimpsest.prove.evidence import EvidenceFolder, manifest_text, new_run_id
from palimpsest.prove.extras import identity
from palimpsest.prove.qualify import Request, publish
from palimpsest.prove.rank_setup import Job, Setup
from palimpsest.prove.verify import verify
from palimpsest.ranks.spawn import RankExit

Flags = list[dict[str, Any]]


def refusals(job: Job, results: list[dict[str, Any]], place: Path) -> Flags:
    """One flag of ``verify`` a forgery, FAIL when it was refused; an ERROR of no gate when the healthy record is."""
    folder = _published(job, results, place)
    healthy = _refused(folder)
    if healthy:
        return [{"gate": "stopped", "verdict": "ERROR", "first_failure": f"the healthy record is refused: {healthy}"}]
    flags = []
    for name, change in FORGERIES.items():
        copy = Path(shutil.copytree(folder, place / "forged" / name / folder.name))
        change(copy)
        why = _refused(copy)
        if not why:
            return [
                {"gate": "verify", "verdict": "PASS", "first_failure": None},
                {"gate": "stopped", "verdict": "ERROR", "first_failure": f"not refused: {name}"},
            ]
        flags.append({"gate": "verify", "verdict": "FAIL", "first_failure": why})
    return flags


def _published(job: Job, results: list[dict[str, Any]], place: Path) -> Path:
    """Evidence of in-process ranks, as if each had been a process of its own."""
    results = json.loads(json.dumps(results))
    setup, ended = Setup(job), []
    for rank, result in enumerate(results):
        result["extras"]["identity"] |= {"pid": 1000 + rank, "deadline_s": "1.0"}
        ended.append(RankExit(rank, 1000 + rank, result))
    stated = [result["extras"]["identity"] for result in results]
    for flag in liveness.cells(ended, stated, identity(setup), deadline_s=1.0, left=[]):
        results[int(str(flag["rank"]))]["flags"].append(flag)
    with EvidenceFolder(place / "evidence", new_run_id()) as folder:
        return publish(folder, setup, results, request=Request(model=Path(job.model)), elapsed_ns=1).folder


def _refused(folder: Path) -> str:
    try:
        verify(folder)
    except EvidenceError as error:
        return str(error)
    return ""


def _seal(folder: Path) -> None:
    """What a forger does last: a fresh manifest."""
    names = [p.name for p in sorted(folder.iterdir()) if p.name != "MANIFEST.sha256"]
    (folder / "MANIFEST.sha256").write_text(manifest_text(folder, names))


def _record(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads((folder / "record.json").read_text())
    change(record)
    (folder / "record.json").write_text(canonical(record) + "\n")
    _seal(folder)


def _flags(folder: Path, change: Callable[[Flags], object]) -> None:
    flags = [json.loads(line) for line in (folder / "flags.jsonl").read_text().splitlines()]
    change(flags)
    raw = "".join(canonical(flag) + "\n" for flag in flags).encode()
    (folder / "flags.jsonl").write_bytes(raw)
    _record(folder, lambda record: record["flags"].update(sha256=hashlib.sha256(raw).hexdigest(), cells=len(flags)))


def _without_last_rank(flags: Flags) -> None:
    last = max(flag["rank"] for flag in flags)
    flags[:] = [flag for flag in flags if flag["rank"] != last]


def _fewer(flags: Flags) -> None:
    cell = next(flag for flag in flags if flag["gate"] == "K2")
    cell["n_expected"] = cell["n_checked"] = 1


def _cut(folder: Path) -> None:
    path = folder / "flags.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    _seal(folder)


#: what is done to a copy of a good folder
FORGERIES: dict[str, Callable[[Path], None]] = {
    "verdict": lambda folder: _record(folder, lambda record: record.update(gates_verdict="FAIL")),
    "flag": lambda folder: _flags(folder, lambda flags: flags[0].update(verdict="FAIL", first_failure="forged")),
    "count": lambda folder: _flags(folder, _fewer),
    "cut": _cut,
    "rank": lambda folder: _flags(folder, _without_last_rank),
}
