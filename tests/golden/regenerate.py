"""Rewrite the recipe goldens: ``python tests/golden/regenerate.py``. Read the diff first: a golden is a decision."""

import json
import re
from pathlib import Path

from palimpsest import recipes
from palimpsest.core.canon import plain
from palimpsest.core.spec import KINDS, Limits, Program
from palimpsest.plan.lifetime import Lifetimes

HERE = Path(__file__).parent
#: the sizes whose program digests are frozen
LIMITS = Limits(tokens=1 << 17, rows=4096, ranks=16)


def golden(name: str) -> dict[str, object]:
    """Everything frozen about one preset: every geometry field, and the digest of a full and of a shared layer's program."""
    geometry = recipes.load_geometry(name)
    formats = recipes.default_formats(geometry)
    layers = [geometry.full_layers[0], *[i for i, kind in enumerate(geometry.schedule) if kind == "shared"][:1]]
    programs = {str(layer): recipes.program(geometry, LIMITS, formats, layer).digest for layer in layers}
    return {
        "formats": plain(formats),
        "geometry": _readable(geometry),
        "programs": programs,
        "tables": plain(recipes.tables(geometry)),
    }


def _readable(geometry: object) -> dict[str, object]:
    fields = plain(geometry)
    fields["schedule"] = "".join({"full": "F", "shared": "S", "linear": "L"}[kind] for kind in fields["schedule"])
    return fields


def model_golden(name: str) -> dict[str, object]:
    """The totals of one whole model: bytes of one rank by kind, by weight storage, and of the largest roles."""
    geometry = recipes.load_geometry(name)
    tokens = min(1 << 20, geometry.max_context // 64 * 64)
    found: dict[str, object] = {"parameters": recipes.model_parameters(geometry), "tokens": tokens, "rows": 4096, "ranks": 16}
    limits, formats = Limits(tokens=tokens, rows=4096, ranks=16), recipes.default_formats(geometry)
    for drafter in (None, "dflash2"):
        program = recipes.model_program(geometry, limits, formats, drafter=drafter)
        lifetimes = Lifetimes(program)
        live = lifetimes.live_bytes()
        found["plain" if drafter is None else drafter] = {
            "buffers": len(program.all_buffers),
            "steps": len(program.steps),
            "bytes": {k: sum(b.nbytes for b in program.all_buffers if b.kind == k) for k in KINDS},
            "lower_bound": max(live),
            "peak_step": lifetimes.step_name(live.index(max(live)) - 1),
            "facts": dict(program.facts),
        }
    found["roles"] = {
        role: list(entry) for role, entry in sorted(_roles(program).items(), key=lambda item: (-item[1][0], item[0]))[:40]
    }
    found["weights"] = {
        storage: sum(
            b.nbytes for b in recipes.model_program(geometry, limits, formats, weights=storage).buffers if b.kind == "weights"
        )
        for storage in ("bf16", "fp8", "mxfp4")
    }
    return found


def _roles(program: Program) -> dict[str, tuple[int, int, str]]:
    """Role -> bytes of one buffer, how many there are, formula; scratch left out."""
    found: dict[str, tuple[int, int, str]] = {}
    for b in program.buffers:
        role = f"{b.kind} {re.sub(r'^layer[0-9]{3}', 'layer', b.name)}"
        count = found[role][1] if role in found else 0
        found[role] = (b.nbytes, count + 1, b.formula)
    return found


def text(name: str) -> str:
    return json.dumps(golden(name), indent=1, sort_keys=True) + "\n"


def model_text(name: str) -> str:
    return json.dumps(model_golden(name), indent=1) + "\n"


def main() -> None:
    for name in recipes.presets():
        (HERE / f"recipe-{name}.json").write_text(text(name), "utf-8")
        (HERE / f"model-{name}.json").write_text(model_text(name), "utf-8")


if __name__ == "__main__":
    main()
