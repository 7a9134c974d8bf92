"""``palimpsest explain``: why the peak of a plan is the peak, and what each reuse of bytes saved.

Imports neither torch nor numpy.
"""

import argparse

NAME = "explain"
HELP = "why the peak of a plan is the peak: who is alive there and why, and what each reuse of bytes saved"
#: names the ``--json`` form
FORMAT = "palimpsest-explain-1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a preset name, a config.json, or a checkpoint folder")
    parser.add_argument(
        "--context", metavar="TOKENS", help="history tokens to prepare, such as 256K or 1M (default: the model's own)"
    )
    parser.add_argument("--rows", metavar="ROWS", default="4096", help="query rows of one prefill chunk (default: 4096)")
    parser.add_argument("--ranks", metavar="N", default="1", help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--page", metavar="TOKENS", default="64", help="tokens of one cache page and shard block (default: 64)")
    parser.add_argument("--layer", metavar="N", type=int, help="0-based layer (default: the first one that runs an indexer)")
    parser.add_argument("--json", action="store_true", help="canonical JSON on stdout, both arrangements")


def run(args: argparse.Namespace) -> int:
    """Plan, check, explain. Raises UserError for anything the user can fix; nothing is written anywhere."""
    from palimpsest.api import load_geometry, plan
    from palimpsest.core.spec import Limits
    from palimpsest.core.units import parse_count

    geometry = load_geometry(args.model)
    tokens = parse_count(args.context, "--context") if args.context else geometry.max_context
    rows, ranks = parse_count(args.rows, "--rows"), parse_count(args.ranks, "--ranks")
    planned = plan(geometry, Limits(tokens, rows, ranks, parse_count(args.page, "--page")), layer=args.layer)
    on, off = planned.explain(), planned.explain("off")
    if args.json:
        from palimpsest.core.canon import canonical

        print(canonical({"format": FORMAT, "model": geometry.name, "limits": planned.program.limits, "on": on, "off": off}))
    else:
        from palimpsest.report.explain_text import show

        show(on, off)
    return 0
