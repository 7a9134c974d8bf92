"""``palimpsest fit``: the largest context or rows, or the fewest ranks, for a memory; from a config alone.

Imports neither torch nor numpy.
"""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palimpsest.core.geometry import Geometry
    from palimpsest.plan.fit import Budget, Build, Fit

NAME = "fit"
HELP = "largest context (or rows, or fewest ranks) for a memory, and what cannot fit; no weights, no GPU"
#: names the ``--json`` form
FORMAT = "palimpsest-fit-1"
ROWS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a preset name, a config.json, or a checkpoint folder")
    parser.add_argument("--memory", metavar="SIZE", required=True, help="memory of one rank's device, such as 96GiB")
    parser.add_argument("--ranks", metavar="N", help="tensor-parallel ranks (default: 1, or the fewest when --context is given)")
    parser.add_argument(
        "--rows", metavar="ROWS", help="query rows of one prefill chunk (default: 4096, or the most for --context and --ranks)"
    )
    parser.add_argument(
        "--context", metavar="TOKENS", help="history tokens that must fit; then the rows or the ranks are what is searched"
    )
    parser.add_argument(
        "--weights", metavar="F", help="resident weights: checkpoint (as published), bf16, fp8 or mxfp4 (default: checkpoint)"
    )
    parser.add_argument("--index-format", metavar="F", help="index cache records: fp8 or fp32 (default: fp8)")
    parser.add_argument(
        "--latent-format", metavar="F", help="latent cache records: fp8, fp8_ds_mla, bf16 or fp32 (default: the model's)"
    )
    parser.add_argument(
        "--drafter", metavar="NAME", help="plan a drafter's buffers with the model: dflash or dflash2 (default: none)"
    )
    parser.add_argument(
        "--layer", metavar="N", type=int, help="only the attention of this 0-based layer, instead of the whole model"
    )
    parser.add_argument("--page", metavar="TOKENS", default="64", help="tokens of one cache page and shard block (default: 64)")
    parser.add_argument(
        "--reserve",
        metavar="SIZE",
        default="0",
        help="memory of one device that other things take: driver context, libraries (default: 0)",
    )
    parser.add_argument(
        "--granularity", metavar="SIZE", default="2MiB", help="what the allocator maps at once; 4KiB on a CPU (default: 2MiB)"
    )
    parser.add_argument("--json", action="store_true", help="canonical JSON on stdout, everything else on stderr")


def run(args: argparse.Namespace) -> int:
    """Search, place, print. 0 when it fits, 1 when it does not. Raises UserError for anything the user can fix."""
    from palimpsest.core.units import parse_bytes
    from palimpsest.plan.fit import Budget
    from palimpsest.recipes import load_geometry

    geometry = load_geometry(args.model)
    budget = Budget(
        parse_bytes(args.memory, "--memory"),
        parse_bytes(args.reserve, "--reserve"),
        parse_bytes(args.granularity, "--granularity"),
    )
    build = builder(args, geometry)
    found = answer(args, geometry, build, budget)
    if args.json:
        from palimpsest.core.canon import canonical

        print(
            canonical(
                {"format": FORMAT, "model": geometry.name, "scope": _scope(args), "declared": geometry.max_context, "fit": found}
            )
        )
    else:
        from palimpsest.report.fit_text import show

        show(geometry, found, _scope(args), _enough(args, build, budget, found))
    return 0 if found.fits else 1


def _scope(args: argparse.Namespace) -> str:
    return "whole model" if args.layer is None else f"attention of layer {args.layer}"


def builder(args: argparse.Namespace, geometry: "Geometry") -> "Build":
    """The program at given limits: the whole model, or one layer's attention. Raises Unsupported and UnknownName."""
    from palimpsest.core.errors import Unsupported
    from palimpsest.recipes import default_formats, program
    from palimpsest.recipes.model import model_program

    given = {name: value for name, value in (("index", args.index_format), ("latent", args.latent_format)) if value}
    formats = default_formats(geometry).replace(**given)
    if args.layer is not None:
        weights = args.weights if args.weights not in (None, "checkpoint") else formats.weights
        if args.drafter:
            raise Unsupported("--drafter plans a drafter beside the whole model; drop --layer")
        return lambda limits: program(geometry, limits, formats.replace(weights=weights), args.layer)
    return lambda limits: model_program(geometry, limits, formats, weights=args.weights or "checkpoint", drafter=args.drafter)


def answer(args: argparse.Namespace, geometry: "Geometry", build: "Build", budget: "Budget") -> "Fit":
    """What the flags ask for: a context, rows, ranks, or only whether it fits."""
    from palimpsest.core.spec import Limits
    from palimpsest.core.units import parse_count
    from palimpsest.plan import fit

    def count(name: str, default: int) -> int:
        value = getattr(args, name)
        return parse_count(value, f"--{name}") if value else default

    page, ranks = count("page", 64), count("ranks", 1)
    if not args.context:
        return fit.largest_context(build, budget, rows=count("rows", ROWS), ranks=ranks, page=page, least=geometry.indexer.topk)
    tokens = count("context", 0)
    if args.ranks and args.rows:
        return fit.fits(build, budget, Limits(tokens, count("rows", ROWS), ranks, page))
    if args.ranks:
        return fit.largest_rows(build, budget, tokens=tokens, ranks=ranks, page=page)
    return fit.fewest_ranks(build, budget, tokens=tokens, rows=min(count("rows", ROWS), tokens), page=page)


def _enough(args: argparse.Namespace, build: "Build", budget: "Budget", found: "Fit") -> int:
    """Ranks that would be enough when it does not fit, 0 when none are or it fits."""
    from palimpsest.plan.fit import RANKS, fewest_ranks

    if found.fits or found.asked == "ranks":
        return 0
    limits = found.limits
    more = tuple(n for n in RANKS if n > limits.ranks)
    if not more:
        return 0
    from palimpsest.core.errors import Unsupported

    try:
        better = fewest_ranks(build, budget, tokens=limits.tokens, rows=limits.rows, page=limits.page, choices=more)
    except Unsupported:
        return 0
    return better.limits.ranks if better.fits else 0
