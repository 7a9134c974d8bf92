"""``palimpsest report``: the page a person reads, made from an evidence folder."""

import argparse

NAME = "report"
HELP = "make the HTML report of an evidence folder (one file, no network)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="evidence/<time>-<run id>, as printed by qualify")
    parser.add_argument("--html", metavar="FILE", required=True, help="where to write the page")


def run(args: argparse.Namespace) -> int:
    """0 when the page was written, 1 when the folder does not hold what it says."""
    from pathlib import Path

    from palimpsest.report.qualify_html import write_report

    print(write_report(Path(args.folder), Path(args.html)))
    return 0
