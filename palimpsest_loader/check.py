"""Everything ahead-of-time compiled programs do not check themselves, checked before the first one is loaded.

A compiled program accepts wrong shapes, overlapping arguments and foreign instructions without a word. So: the machine, every
argument's place, type and reach, no shared byte inside a stage, no shared byte between two lives of the plan.
"""

import os
import platform
from collections.abc import Iterable, Mapping
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from palimpsest_loader.errors import BadCore, WrongMachine
from palimpsest_loader.layout import ceil_div
from palimpsest_loader.manifest import ITEM_BYTES

CONTROL = "control."
Tree = Mapping[str, Any]


def check_machine(environment: Tree, flags: Iterable[str] | None = None) -> None:
    """Raise WrongMachine when this process cannot run the core's programs."""
    import torch

    found = {"torch": torch.__version__, "machine": platform.machine()}
    for name, value in found.items():
        if environment[name] != value:
            raise WrongMachine(f"the core was prepared for {name} {environment[name]}, this is {value}; prepare it again here")
    here = set(cpu_flags() if flags is None else flags)
    missing = [flag for flag in environment["cpu_flags"] if flag not in here]
    if missing:
        raise WrongMachine(
            f"the core's programs use {environment['isa']}; this processor lacks {', '.join(missing)}; prepare it again here"
        )


def cpu_flags() -> list[str]:
    """Instruction sets of this processor, by the names of /proc/cpuinfo; empty where the system does not say."""
    if not os.path.exists("/proc/cpuinfo"):
        return []
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])


def check_native(tree: Tree, name: str, fact: Tree) -> None:
    """Raise BadCore unless native program ``name`` takes exactly what the steps give it, and needs no flag the core hides."""
    for one in (one for step in tree["steps"] for one in step["passes"] if one["program"] == name):
        given: list[Any] = [{key: a[key] for key in ("dtype", "size", "stride", "mutated")} for a in one["args"]]
        wanted = fact["args"]
        if given != wanted:
            at = next((i for i, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b), min(len(given), len(wanted)))
            found, takes = (str(args[at])[:120] if at < len(args) else "nothing" for args in (given, wanted))
            raise BadCore(f"manifest.json: argument {at} of {name} is {found}; the program takes {takes}; prepare the core again")
        loose = [a for a in one["args"] if a["dtype"] == "u8" and a["mutated"] and (a["offset"] % 64 or a["steps"])]
        if loose:
            buffer, at = loose[0]["buffer"], loose[0]["offset"]
            raise BadCore(f"manifest.json: scratch {buffer} of {name} moves, or begins at byte {at}, which is no multiple of 64")
        if any(a["dynamic"] for a in one["args"]):
            raise BadCore(f"manifest.json: an argument of {name} may be shorter in a call; a native program knows one size")
    hidden = sorted(set(fact["cpu_flags"]) - set(tree["environment"]["cpu_flags"]))
    if hidden:
        raise BadCore(f"manifest.json: {name} was compiled for {', '.join(hidden)}, which cpu_flags leaves out; prepare it again")


def check_plan(tree: Tree) -> None:
    """Raise BadCore unless every view of every step stays inside its buffer and shares no byte with what lives beside it."""
    _check_limits(tree["limits"])
    _check_buffers(tree)
    for step in tree["steps"]:
        _check_step(tree, step)
    _check_lives(tree)


def _check_limits(limits: Tree) -> None:
    if min(limits.values()) < 1 or limits["tokens"] % limits["page"] or limits["rows"] % limits["ranks"]:
        raise BadCore(f"manifest.json: limits {dict(limits)} are impossible")


def _check_buffers(tree: Tree) -> None:
    segments, align = tree["backing"]["segments"], tree["backing"]["align"]
    if align < 64 or align & (align - 1):
        raise BadCore(f"manifest.json: backing is aligned to {align}; a power of two from 64 on is wanted")
    for name, buffer in tree["buffers"].items():
        stop, room = buffer["offset"] + buffer["nbytes"], segments.get(buffer["kind"], 0)
        if buffer["offset"] % 64 or stop > room:
            raise BadCore(
                f"manifest.json: buffer {name} at [{buffer['offset']}, {stop}) is unaligned "
                f"or leaves {buffer['kind']} of {room} bytes"
            )
        if not buffer["planes"]:
            raise BadCore(f"manifest.json: buffer {name} has no plane")
        for plane in buffer["planes"]:
            size = ITEM_BYTES[plane["dtype"]]
            if plane["offset"] % size:
                raise BadCore(f"manifest.json: plane {plane['name']} of {name} is unaligned")
            for extent in plane["shape"]:
                size *= extent
            if plane["offset"] + size > buffer["nbytes"]:
                raise BadCore(f"manifest.json: plane {plane['name']} leaves buffer {name}")
    for name in (*tree["inputs"], *tree["outputs"], *tree["histories"]):
        _known(tree, name)
    if not tree["outputs"]:
        raise BadCore("manifest.json: the core has no output")


def _known(tree: Tree, name: str) -> Tree:
    if name not in tree["buffers"]:
        raise BadCore(f"manifest.json: buffer {name!r} is used and not listed")
    return tree["buffers"][name]


def _most(tree: Tree, step: Tree) -> dict[str, int]:
    """Largest value of every axis in ``step``."""
    limits, numbers = tree["limits"], step["numbers"]
    tile, slice_rows = numbers.get("tile", 1), limits["rows"] // limits["ranks"]
    return {
        "row": limits["rows"] - tile, "slot": slice_rows - tile, "head": numbers.get("heads", 1) - 1,
        "key": limits["tokens"] - numbers.get("keys", 0), "place": limits["ranks"] - 1, "page": 0,
    }  # fmt: skip


def _check_step(tree: Tree, step: Tree) -> None:
    most = _most(tree, step)
    used = {axis for one in step["passes"] for argument in one["args"] for axis in argument["steps"]}
    bad = [axis for axis, value in most.items() if value < 0 and axis in used]
    if bad:
        raise BadCore(f"manifest.json: step {step['name']} has tiles larger than what it walks ({', '.join(bad)})")
    for buffer in step["roles"].values():
        _known(tree, buffer)
    if step["runner"] == "rows" and (not step["passes"] or len({tuple(one["loops"][:1]) for one in step["passes"]}) != 1):
        raise BadCore(f"manifest.json: step {step['name']}: its passes do not share their outermost loop")
    for one in step["passes"]:
        if one["program"] not in tree["programs"]:
            raise BadCore(f"manifest.json: step {step['name']} calls {one['program']!r}, which is not listed")
        reaches = [(_reach(tree, step, argument, most), argument) for argument in one["args"]]
        for (a, first), (b, second) in combinations(reaches, 2):
            if (first["mutated"] or second["mutated"]) and a[0] == b[0] and max(a[1], b[1]) < min(a[2], b[2]):
                raise BadCore(
                    f"manifest.json: step {step['name']}: arguments {first['buffer']} and {second['buffer']} share bytes "
                    f"[{max(a[1], b[1])}, {min(a[2], b[2])}) of {a[0]} inside one program, and one of them is changed"
                )


def _reach(tree: Tree, step: Tree, argument: Tree, most: Mapping[str, int]) -> tuple[str, int, int]:
    """(where, first byte, end) of everything the argument can touch. Raises BadCore."""
    name, item, label = argument["buffer"], ITEM_BYTES[argument["dtype"]], f"step {step['name']}: argument {argument['buffer']}"
    size, stride = argument["size"], argument["stride"]
    if len(size) != len(stride) or not size or min(size) < 1:
        raise BadCore(f"manifest.json: {label} has size {size} and stride {stride}")
    if argument["offset"] % item or any(by % item for by in argument["steps"].values()):
        raise BadCore(f"manifest.json: {label} is not aligned to its {item}-byte elements")
    if set(argument["steps"]) - set(most):
        raise BadCore(f"manifest.json: {label} moves along {sorted(argument['steps'])}; axes are {sorted(most)}")
    span = (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1) * item
    end = argument["offset"] + span + sum(by * most[axis] for axis, by in argument["steps"].items())
    if name.startswith(CONTROL):
        where, start, room = name, 0, 8 * step["control"].get(name.removeprefix(CONTROL), 0)
    elif name in tree["weights"]["tensors"]:
        tensor = tree["weights"]["tensors"][name]
        where, start, room = name, 0, _nbytes(tensor)
        if argument["mutated"]:
            raise BadCore(f"manifest.json: {label} is a weight and is changed")
    else:
        buffer = _known(tree, name)
        where, start, room = buffer["kind"], buffer["offset"], buffer["nbytes"]
        if name not in (step["writes"] if argument["mutated"] else [*step["reads"], *step["writes"]]):
            raise BadCore(f"manifest.json: {label} is not among the step's {'writes' if argument['mutated'] else 'reads'}")
        if argument["dynamic"]:
            end = _dynamic_end(tree, argument, end, room)
    if end > room:
        raise BadCore(f"manifest.json: {label} reaches byte {end} of {room}")
    return where, start + argument["offset"], start + end


def _dynamic_end(tree: Tree, argument: Tree, end: int, room: int) -> int:
    """Pages of rank r end at the last page r holds: the largest share belongs to rank 0, so the reach is that of the whole."""
    if "pages" not in argument["dynamic"].values() or "place" not in argument["steps"]:
        return end
    limits, by = tree["limits"], argument["steps"]["place"]
    pages, ranks, item = limits["tokens"] // limits["page"], limits["ranks"], ITEM_BYTES[argument["dtype"]]
    if (
        argument["stride"][0] * item != ranks * by
        or argument["size"][1] * item > by
        or argument["size"][0] != ceil_div(pages, ranks)
    ):
        return room + 1
    return argument["offset"] + pages * by


def _nbytes(tensor: Tree) -> int:
    count: int = ITEM_BYTES[tensor["dtype"]]
    for extent in tensor["shape"]:
        count *= extent
    return count


def lives(tree: Tree) -> dict[str, list[tuple[int, int]]]:
    """Reusable buffer -> (first, last) step of each of its lives. A life begins with a write that does not read.

    Step -1 is the caller before the first step, one past the last is the caller after it.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for name in tree["inputs"]:
        found[name] = [(-1, -1)]
    for at, step in enumerate(tree["steps"]):
        for name in dict.fromkeys((*step["reads"], *step["writes"])):
            known = found.setdefault(name, [])
            if known and name in step["reads"]:
                known[-1] = (known[-1][0], at)
            else:
                known.append((at, at))
    for name in tree["outputs"]:
        if name in found:
            found[name][-1] = (found[name][-1][0], len(tree["steps"]))
    return {n: spans for n, spans in found.items() if n in tree["buffers"] and tree["buffers"][n]["kind"] == "reusable"}


def _check_lives(tree: Tree) -> None:
    """Two reusable buffers that share bytes are never alive together; a buffer is written before it is read."""
    spans, names, written = lives(tree), [s["name"] for s in tree["steps"]], set(tree["inputs"])
    for step in tree["steps"]:
        early = [n for n in step["reads"] if n in spans and n not in written and n not in step["writes"]]
        if early:
            raise BadCore(f"manifest.json: step {step['name']} reads {early[0]} before any step wrote it")
        written |= set(step["writes"])
    for a, b in combinations(sorted(spans), 2):
        one, two = tree["buffers"][a], tree["buffers"][b]
        if max(one["offset"], two["offset"]) >= min(one["offset"] + one["nbytes"], two["offset"] + two["nbytes"]):
            continue
        for first, second in ((x, y) for x in spans[a] for y in spans[b]):
            if max(first[0], second[0]) <= min(first[1], second[1]):
                at = max(first[0], second[0])
                where = names[at] if 0 <= at < len(names) else "the caller"
                raise BadCore(
                    f"manifest.json: buffers {a} and {b} share bytes and are both alive in step {where}: the order is wrong"
                )
    for kind in ("persistent", "staging", "signal"):
        places = sorted((b["offset"], b["offset"] + b["nbytes"], n) for n, b in tree["buffers"].items() if b["kind"] == kind)
        for (_, stop, a), (start, _, b) in pairwise(places):
            if start < stop:
                raise BadCore(f"manifest.json: {kind} buffers {a} and {b} share bytes")
