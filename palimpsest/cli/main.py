"""``palimpsest VERB``: the verb table, one module per verb, and what an error looks like.

A verb module has NAME, HELP, ``add_arguments(parser)`` and ``run(args) -> int``, and imports what it needs inside ``run``:
``palimpsest plan`` must answer without torch. Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 a verdict or
a rank failed, 2 the input is wrong.
"""

import argparse
import importlib
import sys

from palimpsest.core.errors import PalimpsestError

#: verb -> module, in the order a newcomer meets them
VERBS = {
    "plan": "palimpsest.cli.plan",
    "fit": "palimpsest.cli.fit",
    "explain": "palimpsest.cli.explain",
    "checkpoint": "palimpsest.cli.checkpoint",
    "preflight": "palimpsest.cli.preflight",
    "qualify": "palimpsest.cli.qualify",
    "verify": "palimpsest.cli.verify",
    "report": "palimpsest.cli.report",
    "prepare": "palimpsest.cli.prepare",
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of every verb and flag; a test pins them."""
    from palimpsest import __version__

    parser = argparse.ArgumentParser(
        prog="palimpsest",
        description="Plans, proves and runs long-context sparse-attention (DSA) prefill in the smallest fixed memory.",
    )
    parser.add_argument("--version", action="version", version=f"palimpsest {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module_name in VERBS.items():
        module = importlib.import_module(module_name)
        verb = verbs.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Parse, run, and turn every error we know into one line on stderr and an exit code."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except PalimpsestError as error:
        print(f"palimpsest {args.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print(f"palimpsest {args.verb}: interrupted; nothing was published", file=sys.stderr)
        return 130
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(f"palimpsest {args.verb}: {error.strerror or error}{where}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
