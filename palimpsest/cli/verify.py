"""``palimpsest verify``: re-derive the verdict of an evidence folder, or check a plan file, with a separate reader."""

import argparse

NAME = "verify"
HELP = "re-derive the verdict of an evidence folder, or check a plan file, from the files alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="PATH", help="evidence/<time>-<run id>, as printed by qualify, or a plan file of plan --output"
    )
    parser.add_argument("--json", action="store_true", help="print what was derived as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """0 when the re-derived verdict is PASS, 1 when it is another one or the folder does not hold what it says."""
    from pathlib import Path

    if args.folder.endswith(".json"):
        return _plan_file(args)
    from palimpsest.prove.verify import verify

    found = verify(Path(args.folder))
    if args.json:
        from palimpsest.core.canon import canonical

        print(canonical(found))
    else:
        from palimpsest.report.qualify_text import show_verified

        show_verified(found, args.folder)
    return 0 if found.verdict == "PASS" else 1


def _plan_file(args: argparse.Namespace) -> int:
    """Certificates, ranges and sizes of a plan file; 0 when all hold, 1 when one does not."""
    from palimpsest.plan.verify import verify_plan_file

    found = verify_plan_file(args.folder)
    if args.json:
        from palimpsest.core.canon import canonical

        print(canonical({"ok": found.ok, "faults": list(found.faults), "checked": found.checked}))
    else:
        print("\n".join(found.lines()))
    return 0 if found.ok else 1
