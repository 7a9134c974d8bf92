"""Time to load and bind a core in a fresh process, cost of one stage call, sizes; and the public helper's load time beside it.

    python benchmarks/load_core.py CORE

Prints one JSON object. Times are the best of ``--runs`` processes, after ``import torch``; nothing here asserts a number.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

LOAD = """
import json, sys, time
import torch
core, started = sys.argv[1], time.perf_counter()
import palimpsest_loader as loader
from palimpsest_loader.comm import Alone
made = loader.load(core, trust=True, rank=0)
loaded = time.perf_counter()
comm = Alone()
comm.size = made.ranks
session = made.bind(comm)
bound = time.perf_counter()
calls = 0
class Count:
    def __call__(self, tensors):
        global calls
        calls += 1
counted = {name: Count() for name in made.programs}
made.programs = counted
rows = torch.zeros(session.view("hidden").shape)
best = None
if made.ranks == 1:
    bare = made.bind()
    for _ in range(4):
        calls, at = 0, time.perf_counter()
        bare.prefill(rows, 0)
        best = min(best or 1e9, (time.perf_counter() - at) / max(1, calls))
found = {"load_s": loaded - started, "bind_s": bound - loaded, "runner_us_per_call": best and best * 1e6, "calls": calls}
print(json.dumps(found))
"""

PUBLIC = """
import json, sys, time
import torch
started = time.perf_counter()
from torch._export import aot_load
for path in sys.argv[1:]:
    aot_load(path, "cpu")
print(json.dumps({"public_s": time.perf_counter() - started}))
"""


def measure(code: str, *words: str, runs: int) -> dict[str, float]:
    """The best of every number over ``runs`` fresh processes."""
    found: dict[str, float] = {}
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        for name, value in json.loads(done.stdout.splitlines()[-1]).items():
            if value is not None:
                found[name] = min(found.get(name, float("inf")), value)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("core", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    programs = sorted((args.core / "programs").glob("*.so"))
    sizes = {"programs": len(programs), "largest_program_bytes": max(p.stat().st_size for p in programs)}
    weights = sum(p.stat().st_size for p in (args.core / "weights").glob("*"))
    ours = measure(LOAD, str(args.core), runs=args.runs)
    public = measure(PUBLIC, *map(str, programs), runs=args.runs)
    print(json.dumps({"core": args.core.name, "weights_bytes": weights, **sizes, **ours, **public}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
