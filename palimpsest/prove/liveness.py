"""Gates L1-L4: what the parent saw of real ranks. A failed run never reaches these cells; it is published as ERROR with the
rank and phase.

L1 every rank's end was noticed and was a result; L2 every rank's calls had the deadline; L3 nothing of the run is left; L4 the
ranks were distinct processes with one source, plan and checkpoint, agreed before the first case.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palimpsest.prove.gates import SEAL, Sheet

#: facts a rank states about itself before the first case
IDENTITY = ("pid", "source", "plan", "checkpoint")
GATES_L = ("L1", "L2", "L3", "L4")


def open_things() -> set[str]:
    """This process's sockets and memory files, by what they are."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "/memfd:")):
            found.add(target)
    return found


def children() -> set[int]:
    """Living processes whose parent this process is."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = (Path("/proc") / entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                found.add(int(entry))
    return found


def left_behind(before: tuple[set[int], set[str]], pids: list[int], folder: Path) -> list[str]:
    """What is there after the run that was not there before it."""
    found = [f"process {pid} of a rank still runs" for pid in pids if _alive(pid)]
    found += [f"child process {pid} is left" for pid in sorted(children() - before[0])]
    found += [f"{name} is still open" for name in sorted(open_things() - before[1])]
    found += [f"{path.name} is left in the ranks' folder" for path in sorted(folder.glob("facts-*"))]
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def cells(
    ended: list[Any], stated: list[Mapping[str, Any]], wanted: Mapping[str, Any], *, deadline_s: float, left: list[str]
) -> list[dict[str, object]]:
    """The flag lines of L1-L4, one unit a rank each.

    ended: RankExit of every rank; stated: what each rank said of itself; wanted: what the parent derives; left: from
    ``left_behind``
    """
    flags: list[dict[str, object]] = []
    pids = [exit_.pid for exit_ in ended]
    for rank, (exit_, said) in enumerate(zip(ended, stated, strict=True)):
        sheet = Sheet(SEAL, rank)
        for gate in GATES_L:
            sheet.expect(gate, 1)
        sheet.cell("L1").check(exit_.rank == rank and exit_.pid > 0, 1, f"rank {rank}'s end was reported as rank {exit_.rank}'s")
        sheet.cell("L2").check(
            said["deadline_s"] == str(deadline_s),
            1,
            f"rank {rank} ran with deadline {said['deadline_s']} s, {deadline_s} s wanted",
        )
        sheet.cell("L3").check(not left, 1, left[0] if left else "")
        different = [name for name in IDENTITY[1:] if said[name] != wanted[name]]
        own = said["pid"] == exit_.pid and pids.count(exit_.pid) == 1
        text = (
            f"rank {rank} has another {different[0]} than the parent"
            if different
            else f"rank {rank} says it is process {said['pid']}, it was {exit_.pid}"
        )
        sheet.cell("L4").check(own and not different, 1, text)
        flags += sheet.close()
    return flags
