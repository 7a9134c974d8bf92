"""The qualifier's self-test: every mutant is run, each must be killed by its designated gates, and each gate must be needed.

The parent hands mutant ids to a few worker processes (``selftest_run``) and judges what they report. A gate is needed when it
kills a mutant that no gate before it, in the registry's order, kills; a gate that is not is dead, and the self-test fails.
Positive controls must be killed by nothing. The result is the kill matrix; one that passed licenses the very source it ran on
(gate V4).
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from palimpsest.core.canon import canonical
from palimpsest.core.errors import PalimpsestError
from palimpsest.prove.evidence import utc_stamp
from palimpsest.prove.gates import GATES
from palimpsest.prove.licence import FILE, SCHEMA
from palimpsest.prove.mutants import BY_ID, MUTANTS, OUTSIDE, Mutant
from palimpsest.prove.record import package_digest, package_root

Tree = dict[str, Any]
#: called with (how many are done, of how many, the mutant that is done, whether all is well with it)
Progress = Callable[[int, int, str, bool], None]
#: numbers of the specification's table
NUMBERS = tuple(f"M{n:02}" for n in range(1, 49))


class SelfTestError(PalimpsestError, RuntimeError):
    """A worker of the self-test died, or the source changed under it."""


def order(ids: Iterable[str]) -> list[list[str]]:
    """Units of work, the long ones first; the healthy whole run and what is forged from it are one unit."""
    together, wanted = ["OK1", "M46"], list(ids)
    units = [[i] for i in wanted if i not in together]
    units.sort(key=lambda unit: (BY_ID[unit[0]].kind != "ranks" and not BY_ID[unit[0]].alone, BY_ID[unit[0]].action != "stopped"))
    both = [i for i in together if i in wanted]
    return [both, *units] if both else units


def run(ids: Iterable[str] = tuple(BY_ID), *, workers: int = 2, progress: Progress | None = None) -> Tree:
    """Run these mutants (all of them, for a licence) and return the kill matrix. Raises SelfTestError."""
    started, source = time.monotonic(), package_digest(package_root())
    wanted = list(ids)
    units: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for unit in order(wanted):
        units.put(unit)
    found: dict[str, Tree] = {}

    def told(answer: Tree) -> None:
        found[answer["id"]] = answer
        if progress is not None:
            mutant = BY_ID[answer["id"]]
            progress(len(found), len(wanted), mutant.id, not missing(mutant, kills(answer)))

    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(_worker, units, told) for _ in range(workers)]:
            done.result()
    if package_digest(package_root()) != source:
        raise SelfTestError("the source changed while the self-test ran; run it again")
    answers = [found[i] for i in BY_ID if i in found]
    return judge(answers, source=source, elapsed_s=round(time.monotonic() - started), complete=set(found) == set(BY_ID))


def _worker(units: "queue.SimpleQueue[list[str]]", told: Callable[[Tree], None]) -> None:
    """One worker process, fed until the queue is empty."""
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "palimpsest.prove.selftest_run"], cwd=package_root().parent,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            while (unit := _next(units)) is not None:
                for mutant in unit:
                    child.stdin.write(mutant + "\n")
                    child.stdin.flush()
                    line = child.stdout.readline()
                    if not line:
                        log.seek(0)
                        raise SelfTestError(f"the worker died on mutant {mutant}: {log.read()[-400:].strip()}")
                    told(json.loads(line))
        finally:
            child.stdin.close()
            child.wait()
            child.stdout.close()


def _next(units: "queue.SimpleQueue[list[str]]") -> list[str] | None:
    try:
        return units.get_nowait()
    except queue.Empty:
        return None


def kills(answer: Mapping[str, Any]) -> list[str]:
    """What did not pass, in the registry's order; gates outside the registry last."""
    rank = {gate: at for at, gate in enumerate(GATES)}
    return sorted((g for g, v in answer["verdicts"].items() if v != "PASS"), key=lambda g: (rank.get(g, len(rank)), g))


def missing(mutant: Mutant, killed_by: Sequence[str]) -> list[str]:
    """Designated gates that did not notice; for a control, gates that did."""
    return (
        list(killed_by)
        if mutant.control
        else [gate for gate in mutant.gates if gate not in killed_by] or _unplanned(mutant, killed_by)
    )


def _unplanned(mutant: Mutant, killed_by: Sequence[str]) -> list[str]:
    """A run that stopped before its gates were asked proves nothing about them."""
    return ["stopped"] if "stopped" in killed_by else []


def needed(rows: Sequence[Tree]) -> dict[str, str | None]:
    """Gate -> the first mutant that it kills and no gate before it does."""
    found: dict[str, str | None] = dict.fromkeys(GATES)
    for row in rows:
        if not row["control"] and row["killed_by"] and row["killed_by"][0] in found:
            found[row["killed_by"][0]] = found[row["killed_by"][0]] or row["id"]
    return found


def without(rows: Sequence[Tree], gate: str) -> list[str]:
    """M47: mutants that survive when ``gate`` says PASS whatever there is."""
    return [row["id"] for row in rows if gate in row["designated"]]


def judge(answers: Sequence[Tree], *, source: str, elapsed_s: int, complete: bool) -> Tree:
    """The kill matrix and its verdict."""
    rows: list[Tree] = []
    for answer in answers:
        mutant, killed_by = BY_ID[answer["id"]], kills(answer)
        rows.append(
            {
                "id": mutant.id,
                "title": mutant.title,
                "kind": mutant.kind,
                "point": mutant.point,
                "action": mutant.action,
                "argument": mutant.argument,
                "form": mutant.form,
                "seed": mutant.seed,
                "cases": list(mutant.cases),
                "parts": list(mutant.parts),
                "ranks": mutant.ranks,
                "control": mutant.control,
                "designated": list(mutant.gates),
                "killed_by": killed_by,
                "missing": missing(mutant, killed_by),
                "verdicts": answer["verdicts"],
                "why": answer["why"],
            }
        )
    first = needed(rows)
    dead = [gate for gate, by in first.items() if by is None]
    # M47: a matrix in which any one gate is a stub must not pass
    stubbed = {gate: len(without(rows, gate)) for gate in GATES}
    survivors = [row["id"] for row in rows if row["missing"]]
    survivors += ["M47"] if complete and not all(stubbed.values()) else []
    good = complete and not survivors and not dead
    return {
        "schema": SCHEMA,
        "verdict": "PASS" if good else "FAIL",
        "package_digest": source,
        "engine": "portable",
        "complete": complete,
        "made_utc": utc_stamp(),
        "elapsed_s": elapsed_s,
        "mutants": rows,
        "gates": first,
        "stubbed": stubbed,
        "survivors": survivors,
        "dead": dead,
        "score": score(rows, survivors),
    }


def score(rows: Sequence[Tree], survivors: Sequence[str]) -> Tree:
    """How many of the specification's 48 were run, and were killed in all their variants."""
    bad = {i.partition("/")[0] for i in survivors}
    there = {row["id"].partition("/")[0] for row in rows} | {"M47"}
    run_, killed = [n for n in NUMBERS if n in there], [n for n in NUMBERS if n in there and n not in bad]
    return {"of": len(NUMBERS), "run": len(run_), "killed": len(killed), "controls": sum(row["control"] for row in rows)}


def save(matrix: Tree, path: Path) -> Path:
    """Write the matrix, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + f".{os.getpid()}")
    partial.write_text(canonical(matrix) + "\n")
    os.replace(partial, path)
    return path


def summary(matrix: Tree) -> str:
    """One line."""
    s = matrix["score"]
    text = f"self-test {matrix['verdict']}: {s['killed']}/{s['of']} mutants killed, {s['controls']} controls, "
    text += f"{len(matrix['mutants'])} runs in {matrix['elapsed_s']} s"
    for name in ("survivors", "dead"):
        if matrix[name]:
            text += f"; {name}: {', '.join(matrix[name])}"
    return text if matrix["complete"] else f"{text}; only a part was run"


__all__ = ["FILE", "MUTANTS", "OUTSIDE", "SelfTestError", "judge", "run", "save", "summary"]
