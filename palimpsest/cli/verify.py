"""``palimpsest verify``: re-derive the verdict of an evidence folder with a separate reader."""

import argparse

NAME = "verify"
HELP = "re-derive the verdict of an evidence folder from its files alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="evidence/<time>-<run id>, as printed by qualify")
    parser.add_argument("--json", action="store_true", help="print what was derived as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """0 when the re-derived verdict is PASS, 1 when it is another one or the folder does not hold what it says."""
    from pathlib import Path

    from palimpsest.prove.verify import verify

    found = verify(Path(args.folder))
    if args.json:
        from palimpsest.core.canon import canonical

        print(canonical(found))
    else:
        from palimpsest.report.qualify_text import show_verified

        show_verified(found, args.folder)
    return 0 if found.verdict == "PASS" else 1
