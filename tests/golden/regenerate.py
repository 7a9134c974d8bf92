"""Rewrite the recipe goldens: ``python tests/golden/regenerate.py``. Read the diff first: a golden is a decision."""

import json
from pathlib import Path

from palimpsest import recipes
from palimpsest.core.canon import plain
from palimpsest.core.spec import Limits

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


def text(name: str) -> str:
    return json.dumps(golden(name), indent=1, sort_keys=True) + "\n"


def main() -> None:
    for name in recipes.presets():
        (HERE / f"recipe-{name}.json").write_text(text(name), "utf-8")


if __name__ == "__main__":
    main()
