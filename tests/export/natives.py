"""A core of one step: index_select of the avx engine as native code, fed by hand. Compiled for real, in half a minute."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import palimpsest_loader
from palimpsest.core.units import align_up
from palimpsest.export import manifest, native
from palimpsest.export.prepare import Options, Store, environment, recipe_of, run_jobs, view_spec, write_job
from palimpsest.export.store import Entry
from palimpsest.export.toolchain import find
from palimpsest.kernels.call import TORCH_DTYPES, Call, Chunk, Scratch
from palimpsest.kernels.table import implementation
from palimpsest_loader.check import check_plan
from palimpsest_loader.manifest import read

#: buffers that the caller fills, and what the step gives
GIVEN, FOUND = ("index_query", "head_weights", "index_history"), ("local_ids", "local_counts")
#: over two key tiles of which the last begins earlier, whole and ragged row tiles, fewer tokens than the top-k, one row, none
CHUNKS = ((5020, 100), (0, 100), (4090, 7), (200, 0), (1000, 1), (5020, 100))


@dataclass
class Made:
    """one: the planned layer; folder, digest: its cut-down core; entries: program -> store entry."""

    one: Any
    folder: Path
    digest: str
    entries: dict[str, Entry]
    store: Path

    @property
    def tree(self) -> dict[str, Any]:
        return read((self.folder / manifest.NAME).read_bytes())

    def publish(self, folder: Path, **changes: Any) -> Path:
        """The same core in ``folder`` with other manifest fields, sealed again."""
        for name in self.tree["files"]:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((self.folder / name).read_bytes())
        (folder / manifest.NAME).write_bytes(manifest.encode(self.tree | changes))
        return folder


def compiled(one: Any, store: Path, folder: Path, isa: str | None) -> dict[str, Entry]:
    """The native programs of ``one`` through the real workers."""
    folder.mkdir(parents=True)
    tools, kept, jobs, keys = find(isa), Store(store), [], {}
    for name, what in one.built.natives.items():
        text = native.template(name, what, one.built.arguments(name))
        recipe = recipe_of(text, tools, kept)
        keys[name] = recipe.key
        jobs.append(write_job(folder, name, text, view_spec(one.program, one.plan, one.built.arguments(name)), recipe))
    run_jobs(jobs, Options(store, jobs=1), lambda name, what: None)
    return {name: kept.get(key) for name, key in keys.items()}


def cut(one: Any, entries: dict[str, Entry], isa: str | None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(manifest without checksum, files): the hidden rows copied in, then the selection, over buffers that stay."""
    whole, tools = one.tree(), find(isa)
    steps = [s for s in whole["steps"] if s["runner"] in ("input", "select")]
    steps[0] |= {"passes": [], "control": {}, "reads": [], "writes": ["hidden"]}
    buffers, at = {}, 0
    for name in ("hidden", *GIVEN, *FOUND):
        buffers[name] = whole["buffers"][name] | {"kind": "persistent", "offset": at}
        at = align_up(at + buffers[name]["nbytes"], 64)
    scratch = next(n for n in steps[1]["writes"] if n not in buffers)
    buffers[scratch] = whole["buffers"][scratch] | {"offset": 0}
    files = {manifest.program_file(e.folder.name): e.program.read_bytes() for e in entries.values()}
    files["weights/rank0.safetensors"] = (2).to_bytes(8, "little") + b"{}"
    programs = {
        name: {"engine": one.built.engine(name), "file": manifest.program_file(e.folder.name), "key": e.folder.name,
               "template": e.meta["template.json"], "scratch_bytes": e.meta["scratch_bytes"]}
        for name, e in entries.items()
    }  # fmt: skip
    facts = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    tree = whole | {
        "steps": steps, "buffers": buffers, "outputs": ["hidden"], "histories": [], "programs": programs, "files": facts,
        "weights": {"files": ["weights/rank0.safetensors"], "tensors": {}}, "environment": environment(tools, one.built),
        "backing": whole["backing"] | {"segments": {"persistent": at, "reusable": buffers[scratch]["nbytes"]}},
    }  # fmt: skip
    return tree, files


def make(small: ModuleType, folder: Path, isa: str | None = None) -> Made:
    one = small.planned(engine="avx", tokens=5120, rows=100)
    entries = compiled(one, folder / "store", folder / "jobs", isa)
    tree, files = cut(one, entries, isa)
    core = folder / "core"
    for name, data in files.items():
        (core / name).parent.mkdir(parents=True, exist_ok=True)
        (core / name).write_bytes(data)
    data = manifest.encode(tree)
    (core / manifest.NAME).write_bytes(data)
    check_plan(read(data))
    return Made(one, core, hashlib.sha256(data).hexdigest(), entries, folder / "store")


def operands(made: Made, seed: int = 5) -> dict[str, bytes]:
    """Bytes of the given buffers: e4m3 codes of both signs, some of the keys NaN, equal scores by repeated keys."""
    random, found = torch.Generator().manual_seed(seed), {}
    for name in GIVEN:
        buffer = made.tree["buffers"][name]
        raw = torch.zeros(buffer["nbytes"], dtype=torch.uint8)
        for plane in buffer["planes"]:
            values = torch.randn(plane["shape"], generator=random)
            if plane["name"] == "scales":
                values = values.abs()
            if plane["name"] == "keys":
                values[1::3] = values[::3][: len(values[1::3])]
                values[::101, 0] = torch.nan
            one = values.to(TORCH_DTYPES[plane["dtype"]]).contiguous().view(-1).view(torch.uint8)
            raw[plane["offset"] : plane["offset"] + one.numel()] = one
        found[name] = bytes(raw.numpy().tobytes())
    return found


class _One:
    rank, size = 0, 1


def eager(made: Made, given: dict[str, bytes], chunks=CHUNKS) -> list[bytes]:
    """Per chunk the bytes of ids and counts that the eager avx engine leaves for the active rows."""
    step = next(s for s in made.one.program.steps if s.op == "index_select")
    raws = {n: torch.frombuffer(bytearray(data), dtype=torch.uint8) for n, data in given.items()}
    raws |= {n: torch.full((made.tree["buffers"][n]["nbytes"],), 0x7F, dtype=torch.uint8) for n in FOUND}
    views = {}
    for name, raw in raws.items():
        views[name] = {}
        for plane in made.tree["buffers"][name]["planes"]:
            kind = TORCH_DTYPES[plane["dtype"]]
            count = int(torch.Size(plane["shape"]).numel()) * kind.itemsize
            views[name][plane["name"]] = raw[plane["offset"] : plane["offset"] + count].view(kind).view(plane["shape"])
    roles = dict((*step.reads, *step.writes, *step.updates))
    room = torch.zeros(step.scratch + 64, dtype=torch.uint8)
    scratch = Scratch(room[-room.data_ptr() % 64 :][: step.scratch])
    bound = {role: views[name] for role, name in roles.items()}
    call = Call(step.name, dict(step.params), bound, {}, scratch, _One())
    found = []
    for history, rows in chunks:
        implementation("index_select", "avx")(call, Chunk(history, rows))
        planes = [views[name][plane] for name in FOUND for plane in sorted(views[name])]
        found.append(b"".join(plane[:rows].numpy().tobytes() for plane in planes))
    return found


#: what a process does that has the loader and torch, and neither numba nor this package
ALONE = """
import json, sys
for name in ("numba", "llvmlite", "palimpsest"):
    sys.modules[name] = None
import torch, palimpsest_loader
core, digest, data, chunks, found = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), json.loads(sys.argv[5])
out = []
with palimpsest_loader.load(core, digest).bind() as session:
    for name in json.loads(sys.argv[6]):
        session.raw(name).copy_(torch.frombuffer(bytearray(open(f"{data}/{name}", "rb").read()), dtype=torch.uint8))
    hidden = torch.zeros(100, session.view("hidden").shape[1])
    for history, rows in chunks:
        session.poison(0x7F)
        session.prefill(hidden[:rows], history)
        planes = [session.view(name, plane) for name in found for plane in sorted(session.views[name])]
        out.append(b"".join(p[:rows].contiguous().numpy().tobytes() for p in planes).hex())
assert not [m for m in sys.modules if m.startswith(("numba.", "llvmlite.", "palimpsest.", "torch._dynamo", "torch._inductor"))]
print(json.dumps(out))
"""


def alone(made: Made, folder: Path) -> list[bytes]:
    """What the core gives for ``CHUNKS`` in a process of its own, with nothing importable but torch and the loader."""
    packages = folder / "packages"
    shutil.copytree(Path(palimpsest_loader.__file__).parent, packages / "palimpsest_loader")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *_arguments(made, folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(packages), "PYTHONSAFEPATH": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [bytes.fromhex(one) for one in json.loads(done.stdout)]


def _arguments(made: Made, folder: Path) -> list[str]:
    """The command line of ``ALONE``; the operands go into ``folder``."""
    for name, data in operands(made).items():
        (folder / name).write_bytes(data)
    return [str(made.folder), made.digest, str(folder), json.dumps(CHUNKS), json.dumps(FOUND), json.dumps(GIVEN)]
