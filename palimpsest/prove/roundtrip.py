"""Gates S9 and S10: views keep their identity in another process, and what must be apart from reusable bytes is.

The views' metadata goes through JSON to a fresh process that maps the arenas itself (``view_worker.py``); what it built must be
the same arenas, offsets, shapes, strides and dtypes, and bytes written through one view of a pair must appear in the other. A
copy that turns shared bytes into two allocations fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from palimpsest.core.errors import RankError
from palimpsest.prove.gates import Sheet
from palimpsest.run.arena import Arena

#: seconds a worker may take: a bound against hangs
_WORKER_S = 120
#: kinds that share bytes with nobody
APART = ("staging", "table", "signal")

Tree = dict[str, Any]


def describe(arena: Arena) -> Tree:
    """Every view as metadata: arena name, offset, planes with dtype, shape and byte strides; and where each sharing pair
    overlaps."""
    views: Tree = {}
    for place in (p for p in arena.plan.places if p.nbytes):
        buffer, planes = arena.program.by_name[place.buffer], []
        for plane in buffer.planes:
            tensor = arena.view(place.buffer, plane.name)
            size = tensor.element_size()
            planes.append({
                "name": plane.name, "dtype": plane.dtype, "offset": buffer.plane_offset(plane.name), "shape": list(tensor.shape),
                "strides": [step * size for step in tensor.stride()], "itemsize": size,
            })  # fmt: skip
        views[place.buffer] = {"arena": place.kind, "offset": place.offset, "bytes": place.nbytes, "planes": planes}
    by_name = arena.plan.by_name
    pairs = [[o.early, o.start - by_name[o.early].offset, o.late, o.start - by_name[o.late].offset] for o in arena.plan.overlaps]
    return {"arenas": {kind: {"fd": arena.fd(kind)} for kind in arena.segments}, "views": views, "pairs": pairs}


def ask(asked: Tree) -> Tree:
    """What a fresh process makes of a description. Raises RankError when it dies or says nothing readable."""
    worker = Path(__file__).with_name("view_worker.py")
    fds = [arena["fd"] for arena in asked["arenas"].values()]
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(worker)], input=json.dumps(asked),
        capture_output=True, text=True, timeout=_WORKER_S, pass_fds=fds, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RankError(
            f"the worker that rebuilds the views ended with code {done.returncode}: {done.stderr.strip()[-200:]}",
            rank=0,
            phase="seal",
        )
    answer: Tree = json.loads(done.stdout)
    return answer


def compare(sheet: Sheet, arena: Arena, answer: Tree, arrangement: str) -> None:
    """S9: one unit a view, one a sharing pair."""
    cell, wanted = sheet.cell("S9"), describe(arena)
    for name, view in wanted["views"].items():
        expected = view | {"inode": os.fstat(wanted["arenas"][view["arena"]]["fd"]).st_ino}
        found = answer["views"].get(name, {})
        different = sorted(key for key in expected if found.get(key) != expected[key])
        shown = f"{different[0]} is {found.get(different[0])}, {expected[different[0]]} was sent" if different else ""
        cell.check(not different, 1, f"{arrangement}: {name} came back changed: {shown}"[:400], view["bytes"])
    seen = {(first, second): good for first, second, good in answer["pairs"]}
    for first, _, second, _ in wanted["pairs"]:
        text = f"{arrangement}: {first} and {second} share bytes here and are two allocations in a fresh process"
        cell.check(seen.get((first, second), False), 1, text)


def independence(sheet: Sheet, arena: Arena, arrangement: str) -> None:
    """S10: no byte of staging, tables or signals lies in reusable or persistent memory, by addresses and by files."""
    cell = sheet.cell("S10")
    taken = {
        kind: (s.window.address, s.window.address + s.mapped, s.inode)
        for kind, s in arena.segments.items()
        if kind in ("reusable", "persistent")
    }
    for place in arena.plan.places:
        if place.kind not in APART or not place.nbytes:
            continue
        start = arena.raw(place.buffer).data_ptr()
        stop, inode = start + place.nbytes, arena.segments[place.kind].inode
        hit = [kind for kind, (first, end, other) in taken.items() if inode == other or (start < end and first < stop)]
        cell.check(
            not hit, 1, f"{arrangement}: {place.buffer} ({place.kind}) lies in {hit[0] if hit else ''} memory", place.nbytes
        )
