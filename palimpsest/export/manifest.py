"""The manifest of a core: one JSON value that names every file, buffer, view and step. docs/format.md is the contract.

The loader has a reader of its own, which shares no code with this writer; the golden test compares the bytes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palimpsest.core.spec import Program
from palimpsest.core.units import CPU_ALIGN
from palimpsest.export.stages import Built
from palimpsest.export.weights import weight_buffers
from palimpsest.plan.plan import Plan

NAME = "manifest.json"
FORMAT = "palimpsest-core-1"
#: kinds of bytes the loader allocates; weights and tables are mapped from files
KINDS = ("persistent", "reusable", "staging", "signal")


@dataclass(frozen=True)
class Compiled:
    """One program of the store: its key, the template's digest, bytes of temporaries at most, what runs it."""

    key: str
    template: str
    scratch_bytes: int
    engine: str = "aoti"


def tree(
    program: Program,
    plan: Plan,
    built: Built,
    compiled: Mapping[str, Compiled],
    environment: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    weight_files: list[str],
) -> dict[str, Any]:
    """The manifest without its checksum. ``files``: path -> {"sha256", "bytes"}."""
    limits = program.limits
    return {
        "format": FORMAT,
        "name": program.name,
        "arithmetic": built.arithmetic,
        "environment": dict(environment),
        "program": program.digest,
        "plan": plan.digest,
        "facts": dict(program.facts),
        "limits": {"tokens": limits.tokens, "rows": limits.rows, "ranks": limits.ranks, "page": limits.page},
        "backing": {"align": CPU_ALIGN, "segments": {s.kind: s.nbytes for s in plan.segments if s.kind in KINDS and s.nbytes}},
        "buffers": _buffers(program, plan),
        "inputs": list(program.inputs),
        "outputs": list(program.outputs),
        "histories": list(program.histories),
        "weights": {
            "files": weight_files,
            "tensors": {b.name: {"dtype": b.planes[0].dtype, "shape": list(b.planes[0].shape)} for b in weight_buffers(program)},
        },
        "programs": {
            name: {
                "engine": one.engine,
                "file": program_file(one.key),
                "key": one.key,
                "template": one.template,
                "scratch_bytes": one.scratch_bytes,
            }
            for name, one in compiled.items()
        },
        "steps": [stage.to_json() for stage in built.stages],
        "files": {name: dict(fact) for name, fact in files.items()},
    }


def program_file(key: str) -> str:
    """Where a program lies in the core folder."""
    return f"programs/{key[:24]}.so"


def _buffers(program: Program, plan: Plan) -> dict[str, Any]:
    found = {}
    for buffer in program.all_buffers:
        place = plan.by_name[buffer.name]
        if place.kind in KINDS and place.nbytes:
            planes = [
                {"name": p.name, "dtype": p.dtype, "shape": list(p.shape), "offset": buffer.plane_offset(p.name)}
                for p in buffer.planes
            ]
            found[buffer.name] = {"kind": place.kind, "offset": place.offset, "nbytes": place.nbytes, "planes": planes}
    return found


def encode(value: Mapping[str, Any]) -> bytes:
    """The canonical bytes: sorted keys, no spaces, ASCII, the sha256 of the rest as ``checksum``, one newline."""
    bare = _bytes({key: one for key, one in value.items() if key != "checksum"})
    return _bytes({**value, "checksum": hashlib.sha256(bare).hexdigest()})


def _bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
