"""``python -m benchmarks``: measure, print the table, write JSON."""

import argparse
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.goals import GROUPS, Row, Setting
from palimpsest.core.errors import PalimpsestError
from palimpsest.kernels.detect import available_engines, choose_engine
from palimpsest.kernels.table import compile_engine


def machine() -> dict[str, object]:
    """What the numbers belong to."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    packages = ("torch", "numpy", "numba", "transformers")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names),
        "engines": available_engines(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def show(rows: list[Row], console: Console) -> None:
    table = Table("what", "measured", "goal", "met")
    for row in rows:
        sign = "<=" if row.at_most else ">="
        goal = "" if row.goal is None else f"{sign} {row.goal:g} {row.unit}"
        table.add_row(row.name, f"{row.value:.2f} {row.unit}", goal, {True: "yes", False: "NO", None: ""}[row.met])
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--engine", help="the engine to measure (default: the fastest here)")
    parser.add_argument("--only", nargs="+", choices=sorted(GROUPS), default=list(GROUPS), help="groups to run")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of a race; five at least")
    parser.add_argument("--small", action="store_true", help="leave out what takes minutes: 1M tokens, the larger peers")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    console, log = Console(), Console(stderr=True)
    torch.set_num_threads(1)
    engine = choose_engine(args.engine)
    for one in {engine, *(("amx-union",) if engine == "amx" else ()), *(("avx",) if "avx" in available_engines() else ())}:
        compile_engine(one, lambda done, total, what: log.print(f"compile {done}/{total} {what}"))
    rows = []
    for name in args.only:
        for row in GROUPS[name](Setting(engine, args.repeats, args.small)):
            log.print(f"{row.name}: {row.value:.2f} {row.unit}")
            rows.append(row)
    show(rows, console)
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(), "engine": engine, "rows": [row.plain() for row in rows]}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PalimpsestError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
