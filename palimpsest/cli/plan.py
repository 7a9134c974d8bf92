"""``palimpsest plan``: itemised memory of a prefill per rank, both arrangements, from a config alone.

One layer's attention by default, every layer with ``--scope model``. Imports neither torch nor numpy.
"""

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palimpsest.core.geometry import Formats, Geometry
    from palimpsest.core.spec import Limits, Program
    from palimpsest.plan.account import Comparison
    from palimpsest.plan.plan import Plan

NAME = "plan"
HELP = "itemised memory of a prefill, per rank, with and without reuse; no weights, no GPU"
#: names the ``--json`` form
FORMAT = "palimpsest-plan-report-1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a preset name, a config.json, or a checkpoint folder")
    parser.add_argument(
        "--context", metavar="TOKENS", help="history tokens to prepare, such as 256K or 1M (default: the model's own maximum)"
    )
    parser.add_argument("--rows", metavar="ROWS", default="4096", help="query rows of one prefill chunk (default: 4096)")
    parser.add_argument("--ranks", metavar="N", default="1", help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--layer", metavar="N", type=int, help="0-based layer (default: the first one that runs an indexer)")
    parser.add_argument(
        "--scope", choices=("layer", "model"), default="layer", help="one layer's attention, or every layer (default: layer)"
    )
    parser.add_argument(
        "--reuse", choices=("on", "off"), default="on", help="which arrangement to plan; both are shown (default: on)"
    )
    parser.add_argument("--index-format", metavar="F", help="index cache records: fp8 or fp32 (default: fp8)")
    parser.add_argument(
        "--latent-format", metavar="F", help="latent cache records: fp8, fp8_ds_mla, bf16 or fp32 (default: the model's)"
    )
    parser.add_argument("--activation", metavar="F", help="rows, queries and outputs: bf16 or fp32 (default: bf16)")
    parser.add_argument("--weights", metavar="F", help="resident weights: bf16 or fp32 (default: bf16)")
    parser.add_argument("--page", metavar="TOKENS", default="64", help="tokens of one cache page and shard block (default: 64)")
    parser.add_argument(
        "--granularity", metavar="SIZE", default="4KiB", help="what the allocator maps at once; 2MiB on CUDA (default: 4KiB)"
    )
    parser.add_argument("--output", metavar="FILE", help="also write program, plan and certificates, for palimpsest verify")
    parser.add_argument("--json", action="store_true", help="canonical JSON on stdout, everything else on stderr")
    from palimpsest.report.compare_text import add_compare_arguments
    from palimpsest.report.picture import add_picture_arguments

    add_compare_arguments(parser)
    add_picture_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, check, print. Raises UserError for anything the user can fix; only ``--output`` and pictures are written."""
    from palimpsest.core.units import parse_bytes
    from palimpsest.plan.check import check
    from palimpsest.plan.place import place
    from palimpsest.recipes import load_geometry

    granularity = parse_bytes(args.granularity, "--granularity")
    geometry = load_geometry(args.model)
    limits, formats = _limits(args, geometry), _formats(args, geometry)
    made = _program(args, geometry, limits, formats)
    plans = {reuse: place(made, reuse) for reuse in ("on", "off")}
    for plan in plans.values():
        check(made, plan)
    _notes(geometry, limits, made)
    _write(args, made, plans)
    if args.scope == "model":
        return _show_model(args, geometry, made, plans)
    return _show_layer(args, geometry, made, plans, granularity)


def _program(args: argparse.Namespace, geometry: "Geometry", limits: "Limits", formats: "Formats") -> "Program":
    from palimpsest import recipes
    from palimpsest.core.errors import BadConfig

    if args.scope == "layer":
        return recipes.program(geometry, limits, formats, _layer(args, geometry))
    if args.layer is not None or args.compare:
        raise BadConfig("--scope model plans every layer; drop --layer and --compare, which are about one")
    return recipes.model_program(geometry, limits, formats, weights=args.weights or "checkpoint")


def _notes(geometry: "Geometry", limits: "Limits", made: "Program") -> None:
    if limits.tokens > geometry.max_context:
        print(
            f"note: {geometry.name} declares a context of {geometry.max_context:,} tokens; this plan is for {limits.tokens:,}",
            file=sys.stderr,
        )
    if not made.histories:
        print(
            f"note: {made.name} keeps the ids of an earlier layer and has no index history: both arrangements are the same",
            file=sys.stderr,
        )


def _write(args: argparse.Namespace, made: "Program", plans: dict[str, "Plan"]) -> None:
    """The plan file and the pictures that were asked for."""
    from palimpsest.report.picture import replace_file, write_pictures

    if args.output:
        from palimpsest.plan.file import plan_text

        replace_file(args.output, plan_text(made, plans[args.reuse]).encode())
        print(f"wrote {args.output}; check it with: palimpsest verify {args.output}", file=sys.stderr)
    for path in write_pictures(args, made, plans["on"], plans["off"]):
        print(f"wrote {path}", file=sys.stderr)


def _show_layer(
    args: argparse.Namespace, geometry: "Geometry", made: "Program", plans: dict[str, "Plan"], granularity: int
) -> int:
    from palimpsest.plan.account import compare

    bill = compare(made, plans["on"], plans["off"], granularity)
    others = None
    if args.compare:
        from palimpsest.plan.engines import compare_rows
        from palimpsest.report.compare_text import deployment_of

        others = compare_rows(geometry, made.limits, made, plans["on"], deployment_of(args))
    if args.json:
        from palimpsest.core.canon import canonical

        tree = _tree(args.reuse, geometry, made, plans, bill)
        print(canonical(tree if others is None else tree | {"engines": others}))
        return 0
    from palimpsest.report.plan_text import show

    show(geometry, made, plans, bill, args.reuse)
    if others is not None:
        from palimpsest.report.compare_text import render_compare

        print()
        render_compare(others, made.name, made.limits)
    return 0


def _show_model(args: argparse.Namespace, geometry: "Geometry", made: "Program", plans: dict[str, "Plan"]) -> int:
    from palimpsest.plan.account import roles

    rows, held = roles(made, plans[args.reuse]), _stored_weights(args, geometry, made.limits)
    if args.json:
        import json

        from palimpsest.core.canon import canonical

        tree = {"format": FORMAT, "model": geometry.name, "scope": "model", "facts": dict(made.facts), "reuse": args.reuse}
        tree |= {"digest": plans[args.reuse].digest, "plan": json.loads(plans[args.reuse].to_json()), "roles": rows}
        print(canonical(tree | {"stored_weights": held}))
        return 0
    from palimpsest.report.model_text import show

    show(geometry, made, plans, rows, args.reuse, held)
    return 0


def _stored_weights(args: argparse.Namespace, geometry: "Geometry", limits: "Limits") -> Any:
    """What the checkpoint's own tensors weigh on one rank, when MODEL is a folder with safetensors; None otherwise."""
    from pathlib import Path

    if not Path(args.model).is_dir() or not any(Path(args.model).glob("*.safetensors")):
        return None
    from palimpsest import recipes
    from palimpsest.checkpoint.index import open_checkpoint

    tensors = open_checkpoint(args.model).tensors
    prefix = recipes.resolve_prefix(geometry, tensors)
    headers = {name: (ref.dtype, ref.shape, ref.end - ref.begin) for name, ref in tensors.items()}
    return recipes.weights_from_headers(headers, geometry, limits, prefix)


def _limits(args: argparse.Namespace, geometry: "Geometry") -> "Limits":
    from palimpsest.core.spec import Limits
    from palimpsest.core.units import parse_count

    page = parse_count(args.page, "--page")
    tokens = parse_count(args.context, "--context") if args.context else geometry.max_context
    return Limits(tokens, parse_count(args.rows, "--rows"), parse_count(args.ranks, "--ranks"), page)


def _formats(args: argparse.Namespace, geometry: "Geometry") -> "Formats":
    from palimpsest.core.geometry import Formats

    given = {"index": args.index_format, "latent": args.latent_format, "activation": args.activation, "weights": args.weights}
    return Formats(latent=geometry.latent_format).replace(**{name: value for name, value in given.items() if value})


def _layer(args: argparse.Namespace, geometry: "Geometry") -> int:
    from palimpsest.core.errors import Unsupported

    if args.layer is not None:
        return args.layer
    if not geometry.full_layers:
        raise Unsupported(f"{geometry.name} has no layer that runs an indexer; palimpsest plans sparse attention only")
    return geometry.full_layers[0]


def _tree(reuse: str, geometry: "Geometry", made: "Program", plans: dict[str, "Plan"], bill: "Comparison") -> dict[str, Any]:
    """The ``--json`` form: the chosen plan (as ``Plan.from_json`` reads it), both bills, and which layers attend sparsely."""
    import json

    return {
        "format": FORMAT,
        "model": geometry.name,
        "geometry": geometry,
        "program": made.name,
        "program_digest": made.digest,
        "facts": dict(made.facts),
        "sparse_layers": geometry.sparse_layers,
        "full_layers": geometry.full_layers,
        "reuse": reuse,
        "digest": plans[reuse].digest,
        "plan": json.loads(plans[reuse].to_json()),
        "accounts": bill,
    }
