"""Time to load and bind a core in a fresh process, cost of one stage call, sizes; and torch's public helper beside it.

    python benchmarks/load_core.py CORE

Prints one JSON object. Times are the best of ``--runs`` processes, after ``import torch``; nothing here asserts a number.
``load_s`` contains hashing every file, ``hash_s`` is that part alone. The public helper, ``torch._inductor.aoti_load_package``,
loads the same programs from packages made beforehand; ``public_import_s`` is what it imports, ``public_load_s`` the loading. It
hashes nothing, maps no weights and checks no argument.
"""

import argparse
import json
import subprocess
import sys
import tempfile
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

HASH = """
import hashlib, json, sys, time
started = time.perf_counter()
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        hashlib.file_digest(file, "sha256")
print(json.dumps({"hash_s": time.perf_counter() - started}))
"""

PUBLIC = """
import json, sys, time
import torch
started = time.perf_counter()
from torch._inductor import aoti_load_package
imported = time.perf_counter()
kept = [aoti_load_package(path) for path in sys.argv[1:]]
print(json.dumps({"public_import_s": imported - started, "public_load_s": time.perf_counter() - imported}))
"""


def packages(core: Path, folder: Path) -> list[str]:
    """The core's ahead-of-time compiled programs, each as a package of torch's own format."""
    from torch.export.pt2_archive._package import package_pt2

    tree, found = json.loads((core / "manifest.json").read_text()), []
    for file in sorted({one["file"] for one in tree["programs"].values() if one["engine"] == "aoti"}):
        facts = folder / f"{Path(file).stem}_metadata.json"
        facts.write_text(json.dumps({"AOTI_DEVICE_KEY": "cpu"}))
        found.append(str(folder / f"{Path(file).stem}.pt2"))
        package_pt2(found[-1], aoti_files={"model": [str(core / file), str(facts)]})
    return found


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
    files = [str(path) for path in (*programs, *(args.core / "weights").glob("*"))]
    found = measure(LOAD, str(args.core), runs=args.runs) | measure(HASH, *files, runs=args.runs)
    with tempfile.TemporaryDirectory() as folder:
        made = packages(args.core, Path(folder))
        found |= {"public_programs": len(made)} | measure(PUBLIC, *made, runs=args.runs)
    ours, public = found["load_s"] + found["bind_s"], found["public_import_s"] + found["public_load_s"]
    found |= {
        "hash_bytes_per_s": (weights + sum(p.stat().st_size for p in programs)) / found["hash_s"],
        "public_to_ours": public / ours,
    }
    print(json.dumps({"core": args.core.name, "weights_bytes": weights, **sizes, **found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
