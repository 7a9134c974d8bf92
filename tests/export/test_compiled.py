"""A core compiled by the real workers: qualified, shipped, killed in the middle, raced. Minutes: nightly."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import palimpsest_loader
from palimpsest.core.errors import BadConfig
from palimpsest.export.checkpoint import plan_layer
from palimpsest.export.prepare import Options, prepare_core
from palimpsest.export.qualify_core import qualify_core
from palimpsest.export.rebuild import rebuild_core
from palimpsest.export.store import Store
from palimpsest_loader import BadCore, load
from palimpsest_loader.manifest import read

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600), pytest.mark.xdist_group("core")]


def layer_of(checkpoint: Path):
    return plan_layer(checkpoint, context="256", rows="32", ranks="2", page="16")


def test_core_qualifies(compiled) -> None:
    core, digest, checkpoint, _ = compiled
    report = qualify_core(core, digest, model=checkpoint)
    assert report.passed, report.text()
    assert {"bitwise", "order", "identity", "allocations", "selection", "caches", "histories", "attention", "output"} <= {
        g.name for g in report.gates
    }


def test_second_prepare_is_all_hits_and_the_same_core(compiled, tmp_path) -> None:
    _, digest, checkpoint, store = compiled
    layer = layer_of(checkpoint)
    made = prepare_core(layer.program, layer.plan, layer.fill, tmp_path / "again", Options(store))
    assert (made.hits, made.digest) == (made.programs, digest)


def test_longer_context_reuses_the_programs(compiled, tmp_path) -> None:
    *_, checkpoint, store = compiled
    layer = plan_layer(checkpoint, context="1024", rows="32", ranks="2", page="16")
    made = prepare_core(layer.program, layer.plan, layer.fill, tmp_path / "longer", Options(store))
    assert made.programs - made.hits <= 1  # the key tile grows from 256 to 1,024 tokens


def test_rebuild_without_the_model_gives_the_same_core(compiled, tmp_path) -> None:
    core, digest, _, store = compiled
    assert rebuild_core(core, tmp_path / "rebuilt", Options(store)).digest == digest


def test_taken_folder_is_refused(compiled) -> None:
    core, digest, checkpoint, store = compiled
    layer = layer_of(checkpoint)
    with pytest.raises(BadConfig, match="never changed in place"):
        prepare_core(layer.program, layer.plan, layer.fill, core, Options(store))
    assert load(core, digest).digest == digest


def test_one_flipped_byte_in_every_file_is_refused(compiled, tmp_path) -> None:
    core, digest, *_ = compiled
    copy = tmp_path / "core"
    shutil.copytree(core, copy)
    for path in sorted(p for p in copy.rglob("*") if p.is_file()):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 4
        path.write_bytes(data)
        for how in ({"digest": digest}, {"trust": True}):
            with pytest.raises(BadCore, match=path.name.replace(".", r"\.")):
                load(copy, **how)
        data[len(data) // 3] ^= 4
        path.write_bytes(data)
    assert load(copy, digest).ranks == 2


def test_shipped_core_runs_on_two_ranks_without_palimpsest(compiled, tmp_path) -> None:
    core, digest, *_ = compiled
    packages = tmp_path / "packages"
    shutil.copytree(Path(palimpsest_loader.__file__).parent, packages / "palimpsest_loader")
    shutil.copytree(core, tmp_path / "core")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "palimpsest_loader"]
    done = subprocess.run(
        [*command, "run", "core", "--digest", digest, "--chunks", "32,5,1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(packages), "PYTHONSAFEPATH": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("output  sha256") == 1


def test_weights_are_mapped_once(compiled) -> None:
    """A rank's weights are file pages, shared and clean: nothing private, nothing written."""
    core, digest, *_ = compiled
    code = (
        "import sys, palimpsest_loader as L\nfrom palimpsest_loader.comm import Alone\n"
        f"c = L.load({str(core)!r}, {digest!r}, rank=0); comm = Alone(); comm.size = 2; s = c.bind(comm)\n"
        "s._weights.raw[::4096].sum()\ntext = open('/proc/self/smaps').read()\n"
        "part = text[text.index('rank0.safetensors'):].split('VmFlags')[0]\n"
        "print({l.split(':')[0]: int(l.split()[1]) for l in part.splitlines()[1:] if l.endswith('kB')})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1].replace("'", '"'))
    assert found["Private_Dirty"] == found["Shared_Dirty"] == found["Anonymous"] == 0
    assert found["Rss"] > 0


PREPARE = """
import sys, warnings; warnings.filterwarnings("ignore")
from pathlib import Path
from palimpsest.export.checkpoint import plan_layer
from palimpsest.export.prepare import Options, prepare_core
checkpoint, output, store = map(Path, sys.argv[1:])
layer = plan_layer(checkpoint, context="256", rows="32", ranks="2", page="16")
print(prepare_core(layer.program, layer.plan, layer.fill, output, Options(store)).digest)
"""


@pytest.mark.parametrize("seconds", [2.0, 12.0, 30.0])
def test_killed_prepare_leaves_no_half_core(compiled, tmp_path, seconds: float) -> None:
    """SIGKILL while it exports, looks programs up, or writes; then a second run finishes from the same store."""
    _, digest, checkpoint, store = compiled
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    words = [sys.executable, "-c", PREPARE, str(checkpoint), str(tmp_path / "core"), str(copy)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if (tmp_path / "core").exists():
        assert load(tmp_path / "core", digest).digest == digest
        shutil.rmtree(tmp_path / "core")
    assert all(Store(copy).get(p.name) for p in copy.iterdir() if not p.name.startswith("."))
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest


def test_two_prepares_at_once_give_the_same_core(compiled, tmp_path) -> None:
    _, digest, checkpoint, store = compiled
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    lost = next(p for p in sorted(copy.iterdir()) if not p.name.startswith("."))
    shutil.rmtree(lost)  # both compile it
    words = [[sys.executable, "-c", PREPARE, str(checkpoint), str(tmp_path / name), str(copy)] for name in ("one", "two")]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) for one in words]
    outputs = [process.communicate()[0].strip() for process in running]
    # a recompiled program need not have the same bytes: both cores hold the one that was published first
    assert outputs[0] == outputs[1]
    trees = [read((tmp_path / name / "manifest.json").read_bytes()) for name in ("one", "two")]
    assert trees[0] == trees[1]
    assert load(tmp_path / "one", outputs[0]).digest == outputs[0]
    assert digest
