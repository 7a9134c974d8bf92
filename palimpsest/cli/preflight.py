"""``palimpsest preflight``: does a checkpoint hold what the recipe will use, and what will run? Reads headers only."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palimpsest.checkpoint.preflight import PreflightReport

NAME = "preflight"
HELP = "check a checkpoint folder against its recipe before anything is loaded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="Hugging Face folder: config.json, safetensors files and their index")
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")


def run(args: argparse.Namespace) -> int:
    """0 when the checkpoint is complete and consistent, 2 when it is not."""
    report = examine(args.directory)
    if args.json:
        import json

        print(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    return 0 if report.ok else 2


def examine(directory: str) -> "PreflightReport":
    """Open ``directory``, find its recipe and compare. Raises UserError for what cannot even be compared."""
    from palimpsest import recipes
    from palimpsest.checkpoint.index import open_checkpoint
    from palimpsest.checkpoint.preflight import WeightNames, preflight
    from palimpsest.core.errors import BadCheckpoint

    checkpoint = open_checkpoint(directory)
    geometry = recipes.geometry_from_config(dict(checkpoint.config), checkpoint.root.name)
    try:
        prefix = recipes.resolve_prefix(geometry, checkpoint.tensors)
    except (BadCheckpoint, IndexError):
        # the report says which tensors are missing under the published names
        prefix = recipes.prefixes(geometry)[0]
    names = WeightNames.of(
        geometry,
        lambda g, layer: recipes.attention_tensors(g, layer, prefix),
        lambda g, layer: recipes.forbidden_tensors(g, layer, prefix),
    )
    return preflight(checkpoint, geometry, names)


def _print(report: "PreflightReport") -> None:
    facts = dict(report.facts)
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<18} {_text(value)}")
    for finding in report.findings:
        print(finding)
    errors = len(report.errors)
    print("preflight: ok" if report.ok else f"preflight: {errors} error{'s' * (errors != 1)}; nothing was loaded")


def _text(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        shown = ", ".join(map(str, value[:16]))
        return f"{shown}, ... ({len(value)})" if len(value) > 16 else shown
    return str(value)
