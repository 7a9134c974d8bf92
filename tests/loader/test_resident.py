"""Resident memory of the ranks of one host, by the kernel's own account: each weights file once, plus every rank's arenas."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = os.sysconf("SC_PAGE_SIZE")
#: ranks of the core, ranks that are started, processes of each
RANKS, STARTED, REPLICAS = 8, 2, 2

BIND = """
import json, sys
from pathlib import Path
import torch
from palimpsest_loader.manifest import read
from palimpsest_loader.session import Session
from palimpsest_loader.weights import Weights

class Comm:
    rank, size = int(sys.argv[2]), int(sys.argv[3])

def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) * 1024

tree = read((Path(sys.argv[1]) / "manifest.json").read_bytes())
name = tree["weights"]["files"][Comm.rank]
before = anonymous()
weights = Weights(Path(sys.argv[1]) / name, name, tree["weights"]["tensors"])
session = Session(tree, weights, dict.fromkeys(tree["programs"], len), Comm)
session.poison(1)
for kind in ("persistent", "signal"):
    session.segments[kind].raw.fill_(1)
total = int(weights.raw[::256].sum())  # every page is read
after = anonymous()
print("ready", total, flush=True)
sys.stdin.readline()  # every process holds its mappings now

def block(address):
    found, inside = {}, False
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, end = (int(w, 16) for w in words[0].split("-"))
            inside = first <= address < end
            if inside:
                found["bytes"] = end - first
        elif inside and words[-1] == "kB":
            found[words[0][:-1]] = int(words[1]) * 1024
    return found

arenas = {kind: segment.nbytes for kind, segment in session.segments.items()}
print(json.dumps({"file": name, "weights": block(weights.raw.data_ptr()), "grown": after - before,
                  "arenas": arenas,
                  "reusable": block(session.segments["reusable"].raw.data_ptr())}), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def core(small, tmp_path_factory):
    """Manifest and the first weights of a core with a layer of real width: per rank far more weights than arenas."""
    from palimpsest.export import manifest
    from palimpsest.export.weights import write_weights

    folder = tmp_path_factory.mktemp("resident")
    one = small.planned(preset="k31-pro-layer3", ranks=RANKS, tokens=2048)
    (folder / "weights").mkdir()
    (folder / manifest.NAME).write_bytes(manifest.encode(one.tree()))
    for rank in range(STARTED):
        write_weights(folder / "weights" / f"rank{rank}.safetensors", one.program, one.fill, rank)
    return folder


def test_weights_are_resident_once_and_arenas_once_a_rank(core: Path) -> None:
    """Two replicas of every rank at once: the proportional shares of a file add up to the file, nothing of it is private."""
    words = [[sys.executable, "-c", BIND, str(core), str(rank), str(RANKS)] for rank in range(STARTED) for _ in range(REPLICAS)]
    running = [subprocess.Popen(w, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for w in words]
    try:
        assert all(process.stdout.readline().startswith("ready") for process in running)
        for process in running:
            process.stdin.write("\n")
            process.stdin.flush()
        found = [json.loads(process.stdout.readline()) for process in running]
        for process in running:
            process.communicate("\n", timeout=60)
    finally:
        for process in running:
            process.kill()
    assert {one["file"] for one in found} == {f"weights/rank{rank}.safetensors" for rank in range(STARTED)}
    for rank in range(STARTED):
        mine = [one for one in found if one["file"] == f"weights/rank{rank}.safetensors"]
        size = (core / mine[0]["file"]).stat().st_size
        pages = -(-size // PAGE) * PAGE
        assert [one["weights"]["Rss"] for one in mine] == [pages] * REPLICAS
        # two mappers: each page counts half, and the kernel rounds a share down to whole kB
        assert pages - 1024 * REPLICAS <= sum(one["weights"]["Pss"] for one in mine) <= pages
    for one in found:
        assert one["weights"]["Private_Dirty"] == one["weights"]["Shared_Dirty"] == one["weights"]["Anonymous"] == 0
        assert one["reusable"]["Rss"] >= one["arenas"]["reusable"] // PAGE * PAGE
        arenas, weights = sum(one["arenas"].values()), one["weights"]["Rss"]
        assert arenas <= one["grown"] + PAGE * len(one["arenas"])
        # a second copy of the weights anywhere in the process would be anonymous memory: what grew is nearer to none than to one
        assert one["grown"] - arenas < weights / 2
