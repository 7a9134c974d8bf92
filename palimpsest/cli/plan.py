"""``palimpsest plan``: itemised memory of one layer's prefill per rank, both arrangements, from a config alone.

Imports neither torch nor numpy.
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


def run(args: argparse.Namespace) -> int:
    """Plan, check, print. Raises UserError for anything the user can fix; only ``--output`` is written."""
    from palimpsest.core.units import parse_bytes
    from palimpsest.plan.account import compare
    from palimpsest.plan.check import check
    from palimpsest.plan.place import place
    from palimpsest.recipes import load_geometry, program

    granularity = parse_bytes(args.granularity, "--granularity")
    geometry = load_geometry(args.model)
    limits, formats = _limits(args, geometry), _formats(args, geometry)
    made = program(geometry, limits, formats, _layer(args, geometry))
    plans = {reuse: place(made, reuse) for reuse in ("on", "off")}
    for plan in plans.values():
        check(made, plan)
    bill = compare(made, plans["on"], plans["off"], granularity)
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
    if args.output:
        from pathlib import Path

        from palimpsest.plan.file import plan_text

        Path(args.output).write_text(plan_text(made, plans[args.reuse]), "utf-8")
        print(f"wrote {args.output}; check it with: palimpsest verify {args.output}", file=sys.stderr)
    if args.json:
        from palimpsest.core.canon import canonical

        print(canonical(_tree(args.reuse, geometry, made, plans, bill)))
    else:
        from palimpsest.report.plan_text import show

        show(geometry, made, plans, bill, args.reuse)
    return 0


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
