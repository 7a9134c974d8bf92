"""``palimpsest qualify CORE``: the same binaries under two plans, poisoned; the wrong order; storage identity; allocations;
eager.

Exactness needs no tolerance: a binary that reads a byte before it was written gives other bytes under another plan or poison.
Whether
the arithmetic is right is a question to the eager engine (ids, caches and histories byte for byte) and to the oracle
(attention and
output within derived bounds).
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palimpsest.export import qualify_eager
from palimpsest.export.meter import allocations
from palimpsest.export.replay import Tree, apart, chunks, fill_caches, late_first, on_ranks, trace
from palimpsest_loader.check import check_plan
from palimpsest_loader.core import Core, load
from palimpsest_loader.errors import BadCore
from palimpsest_loader.session import Session

#: bytes that fill reusable and staging memory before a replay. 0xFF is NaN as a float and -1 as an id, which is legal: so
#: three more
POISONS = (0xFF, 0x00, 0x7F, 0xAA)


@dataclass(frozen=True)
class Gate:
    """One finding: ``units`` things were compared; ``detail`` names the first difference, or what was seen."""

    name: str
    passed: bool
    units: int
    detail: str


@dataclass(frozen=True)
class Report:
    """All gates of one core."""

    core: str
    digest: str
    gates: tuple[Gate, ...]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def text(self) -> str:
        lines = [f"core {self.core}  {self.digest[:16]}"]
        lines += [f"  {'PASS' if g.passed else 'FAIL'}  {g.name:<12} {g.units:>7} {g.detail}" for g in self.gates]
        return "\n".join([*lines, f"verdict {'PASS' if self.passed else 'FAIL'}"])


def qualify_core(
    path: Path,
    digest: str | None = None,
    *,
    trust: bool = False,
    model: Path | None = None,
    seed: int = 20261201,
    notify: Callable[[Gate], None] | None = None,
) -> Report:
    """Qualify the core in ``path`` with all its ranks in this process.

    model: the checkpoint it was prepared from; without it the comparison with the eager engine is left out and the report says so
    Raises the loader's errors for a core that does not load.
    """
    core = load(path, digest, trust=trust)
    gates = []
    for judge in (_bitwise, _repeats, _order, _identity, _allocations):
        gates.append(judge(core, seed))
        if notify is not None:
            notify(gates[-1])
    if model is not None:
        for name, passed, units, detail in qualify_eager.compare(core, model, seed):
            gates.append(Gate(name, passed, units, detail))
            if notify is not None:
                notify(gates[-1])
    return Report(str(core.tree["name"]), core.digest, tuple(gates))


def _traces(core: Core, tree: Tree, seed: int, poison: int | None) -> list[tuple[list[str], str]]:
    found = on_ranks(core, tree, lambda session: trace(session, chunks(tree), seed=seed, poison=poison))
    return [(one.replays, one.caches) for one in found]


def _bitwise(core: Core, seed: int) -> Gate:
    """Aliased plan under every poison against the separate plan."""
    wanted = _traces(core, apart(core.tree), seed, POISONS[0])
    units = 0
    for poison in POISONS:
        for rank, (ours, theirs) in enumerate(zip(_traces(core, core.tree, seed, poison), wanted, strict=True)):
            for at, (chunk, x, y) in enumerate(zip(chunks(core.tree), ours[0], theirs[0], strict=True)):
                if x != y:
                    return Gate(
                        "bitwise",
                        False,
                        units,
                        f"rank {rank}, replay {at} {chunk}, poison 0x{poison:02X}: differs from the separate plan",
                    )
                units += 1
            if ours[1] != theirs[1]:
                return Gate(
                    "bitwise", False, units, f"rank {rank}, poison 0x{poison:02X}: the caches differ from the separate plan's"
                )
            units += 1
    saved = apart(core.tree)["backing"]["segments"]["reusable"] - core.tree["backing"]["segments"]["reusable"]
    return Gate("bitwise", True, units, f"aliased = separate under {len(POISONS)} poisons; the plan saves {saved:,} bytes")


def _repeats(core: Core, seed: int) -> Gate:
    """Three queued replays of one chunk, nothing cleaned between them."""
    for rank, (found, _) in enumerate(_traces(core, core.tree, seed, None)):
        if len(set(found[-3:])) != 1:
            return Gate("repeats", False, 3, f"rank {rank}: three queued replays of one chunk differ")
    return Gate("repeats", True, 3 * core.ranks, "three queued replays are equal")


def _order(core: Core, seed: int) -> Gate:
    """The wrong order is refused, and would have been wrong."""
    wrong = late_first(core.tree)
    if wrong is None:
        return Gate("order", True, 0, "one history only: no order to confuse")
    try:
        check_plan(wrong)
        return Gate("order", False, 1, "the loader accepts a plan whose late history is gathered too early")
    except BadCore as error:
        refused = str(error)
    good = _traces(core, core.tree, seed, POISONS[0])
    if _traces(core, wrong, seed, POISONS[0]) == good:
        return Gate("order", False, 2, "the wrong order gives the same bytes, so the comparison shows nothing")
    if _traces(core, apart(wrong), seed, POISONS[0]) != good:
        return Gate("order", False, 3, "the wrong order differs even where no bytes are shared")
    return Gate("order", True, 3, f"wrong order refused ({refused[:70]}...), wrong when forced, harmless apart")


def _identity(core: Core, seed: int) -> Gate:
    """The views of every program, rebuilt in a spawned process from JSON: who shares storage with whom."""
    specs = {one["program"]: view_spec(core.tree, one["args"]) for step in core.tree["steps"] for one in step["passes"]}
    done = subprocess.run(
        [sys.executable, "-m", "palimpsest.export.identity"], input=json.dumps(specs), capture_output=True, text=True, check=False
    )
    if done.returncode:
        return Gate(
            "identity", False, 0, done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else "the process failed"
        )
    found = json.loads(done.stdout)
    for name, spec in specs.items():
        wanted = [
            [i, k]
            for i, a in enumerate(spec["views"])
            for k, b in enumerate(spec["views"])
            if i < k and a["storage"] == b["storage"]
        ]
        if found[name] != wanted:
            return Gate("identity", False, len(specs), f"{name}: pairs {found[name]} share storage, {wanted} should")
    return Gate(
        "identity",
        True,
        sum(len(s["views"]) for s in specs.values()),
        f"views of {len(specs)} programs keep their storages in a spawned process",
    )


def view_spec(tree: Tree, args: list[Tree]) -> Tree:
    """Views of one call at axis values 0, as a worker gets them."""
    views: list[Tree] = []
    storages: dict[str, int] = {}
    for argument in args:
        place = tree["buffers"].get(argument["buffer"])
        storage = argument["buffer"] if place is None else place["kind"]
        start = 0 if place is None else place["offset"]
        last = sum((n - 1) * s for n, s in zip(argument["size"], argument["stride"], strict=True))
        nbytes = 8 * (last + 2) if place is None else tree["backing"]["segments"][storage]
        storages[storage] = max(storages.get(storage, 0), nbytes)
        views.append(
            {
                "storage": storage,
                "byte_offset": start + argument["offset"],
                "size": argument["size"],
                "stride": argument["stride"],
                "dtype": argument["dtype"],
            }
        )
    return {"storages": storages, "views": views}


def _allocations(core: Core, seed: int) -> Gate:
    """Per step: tensor bytes alive at once, and left over; histories allocate nothing, others at most what the manifest says."""
    limit = {
        step["name"]: max((core.tree["programs"][one["program"]]["scratch_bytes"] for one in step["passes"]), default=0)
        for step in core.tree["steps"]
    }
    histories = {step["name"] for step in core.tree["steps"] if step["runner"] == "gather"}

    def main(session: Session) -> dict[str, tuple[int, int]]:
        fill_caches(session, seed)
        last = chunks(core.tree)[0]
        return allocations(session, last, seed)

    most = 0
    for rank, found in enumerate(on_ranks(core, core.tree, main)):
        for name, (peak, left) in found.items():
            allowed = 0 if name in histories else limit[name]
            if peak > allowed or left:
                return Gate(
                    "allocations",
                    False,
                    len(found),
                    f"rank {rank}, step {name}: {peak:,} bytes at once, {allowed:,} allowed, {left:,} left",
                )
            most = max(most, peak)
    return Gate("allocations", True, len(limit), f"histories 0 bytes, others at most {most:,}, nothing left after a step")
