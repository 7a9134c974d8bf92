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
from palimpsest.export.toolchain import find
from palimpsest.kernels.sizes import KEY_TILE
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
    """From a whole key tile on, no other context compiles anything."""
    *_, checkpoint, store = compiled
    for context, most in ((str(KEY_TILE), 1), ("64K", 0), ("1M", 0)):  # the first: its key tile grows from 256 tokens
        layer = plan_layer(checkpoint, context=context, rows="32", ranks="2", page="16")
        made = prepare_core(layer.program, layer.plan, layer.fill, tmp_path / context, Options(store))
        assert made.programs - made.hits <= most, context
        assert load(tmp_path / context, made.digest).tree["limits"]["tokens"] == layer.program.limits.tokens


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


def shipped(core: Path, digest: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """The core and the loader's package alone, copied into ``folder`` and run on two ranks."""
    packages = folder / "packages"
    folder.mkdir(exist_ok=True)
    shutil.copytree(Path(palimpsest_loader.__file__).parent, packages / "palimpsest_loader")
    shutil.copytree(core, folder / "core")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "palimpsest_loader"]
    return subprocess.run(
        [*command, "run", "core", "--digest", digest, "--chunks", "32,5,1"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(packages), "PYTHONSAFEPATH": "1"},
        check=False,
    )


def test_shipped_core_runs_on_two_ranks_without_palimpsest(compiled, tmp_path) -> None:
    core, digest, *_ = compiled
    done = shipped(core, digest, tmp_path)
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


def test_core_for_a_lower_instruction_set(compiled, tmp_path) -> None:
    """An avx2 core on a machine with more: programs of its own, only avx2 asked of the processor, right, and the same twice."""
    if find().isa == "avx2":
        pytest.skip("this machine has nothing above avx2")
    core, _, checkpoint, store = compiled
    layer = layer_of(checkpoint)
    made = prepare_core(layer.program, layer.plan, layer.fill, tmp_path / "avx2", Options(store, 2, "avx2"))
    tree, other = (read((folder / "manifest.json").read_bytes()) for folder in (tmp_path / "avx2", core))
    assert tree["environment"]["isa"] == "avx2"
    assert not [flag for flag in tree["environment"]["cpu_flags"] if flag.startswith("avx512")]
    assert not {p["key"] for p in tree["programs"].values()} & {p["key"] for p in other["programs"].values()}
    report = qualify_core(tmp_path / "avx2", made.digest, model=checkpoint)
    assert report.passed, report.text()
    replays = [shipped(tmp_path / "avx2", made.digest, tmp_path / name) for name in ("one", "two")]
    assert replays[0].returncode == 0, replays[0].stderr
    assert output_line(replays[0]) == output_line(replays[1])


def output_line(done: "subprocess.CompletedProcess[str]") -> str:
    """The digest of a replay's output."""
    return next(line for line in done.stdout.splitlines() if line.startswith("output"))


PREPARE = """
import sys, warnings; warnings.filterwarnings("ignore")
from pathlib import Path
from palimpsest.export.checkpoint import plan_layer
from palimpsest.export.prepare import Options, prepare_core
checkpoint, output, store = map(Path, sys.argv[1:4])
def say(name, what):
    print(f"{name}: {what}", flush=True)
    if len(sys.argv) > 4:
        sys.stdin.readline()  # until the test has decided
layer = plan_layer(checkpoint, context="256", rows="32", ranks="2", page="16")
print(prepare_core(layer.program, layer.plan, layer.fill, output, Options(store), progress=say).digest)
"""


def sound(store: Path, core: Path) -> bool:
    """Whether ``core`` is there; every entry of the store must be whole, and a core that is there must load."""
    assert all(Store(store).get(p.name) for p in store.iterdir() if not p.name.startswith("."))
    if core.exists():
        load(core, trust=True)
    return core.exists()


def without(store: Path, copy: Path, count: int) -> Path:
    """A copy of ``store`` that lacks ``count`` entries."""
    shutil.copytree(store, copy)
    for entry in [p for p in sorted(copy.iterdir()) if not p.name.startswith(".")][:count]:
        shutil.rmtree(entry)
    return copy


def killed(words: list[str], known: set[tuple[str, ...]], scratch: Path) -> tuple[tuple[str, ...], int]:
    """SIGKILL ``prepare`` at its first event that is not ``known``, or let it end; that event, and the exit status."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*words, "wait"], text=True, env={**os.environ, "TMPDIR": str(scratch)}, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    event: tuple[str, ...] = ()
    for line in process.stdout:
        event = tuple(line.split()[:2])  # program, what happened to it
        if len(event) < 2:
            continue  # the digest: it is done
        if event not in known:
            process.kill()
            break
        process.stdin.write("\n")
        process.stdin.flush()
    process.stdin.close()
    return event, process.wait()


def test_killed_at_every_event_leaves_no_half_core(compiled, tmp_path) -> None:
    """SIGKILL while it looks programs up, exports, compiles, writes: all that is there is whole, and a last run finishes."""
    *_, checkpoint, store = compiled
    copy, core, seen = without(store, tmp_path / "store", 2), tmp_path / "core", set()
    words = [sys.executable, "-c", PREPARE, str(checkpoint), str(core), str(copy)]
    (tmp_path / "scratch").mkdir()
    while True:
        event, code = killed(words, seen, tmp_path / "scratch")
        there = sound(copy, core)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert not there, event
        seen.add(event)
    assert {what for _, what in seen} == {"stored", "exported", "compiling", "compiled", "writing"}
    assert there
    assert sorted(p.name for p in tmp_path.iterdir()) == ["core", "scratch", "store"]


def test_a_killed_compile_worker_is_replaced(compiled, tmp_path) -> None:
    """SIGKILL of the worker, compiler and all: its job is tried again, and the core is whole."""
    *_, checkpoint, store = compiled
    copy, core = without(store, tmp_path / "store", 1), tmp_path / "core"
    words = [sys.executable, "-c", PREPARE, str(checkpoint), str(core), str(copy)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.endswith(": compiling\n"):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            while not (found := children.read_text().split()):
                time.sleep(0.05)
            time.sleep(5.0)  # into its work; any moment will do
            os.kill(int(found[0]), signal.SIGKILL)
    assert process.wait() == 0
    assert any("retry: was killed by signal 9" in line for line in lines), lines
    assert any("compiling, attempt 2" in line for line in lines), lines
    assert sound(copy, core)
    assert load(core, lines[-1]).digest == lines[-1]


def test_two_prepares_at_once_give_the_same_core(compiled, tmp_path) -> None:
    _, digest, checkpoint, store = compiled
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    lost = next(p for p in sorted(copy.iterdir()) if not p.name.startswith("."))
    shutil.rmtree(lost)  # both compile it
    words = [[sys.executable, "-c", PREPARE, str(checkpoint), str(tmp_path / name), str(copy)] for name in ("one", "two")]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) for one in words]
    outputs = [process.communicate()[0].splitlines()[-1] for process in running]
    # a recompiled program need not have the same bytes: both cores hold the one that was published first
    assert outputs[0] == outputs[1]
    trees = [read((tmp_path / name / "manifest.json").read_bytes()) for name in ("one", "two")]
    assert trees[0] == trees[1]
    assert load(tmp_path / "one", outputs[0]).digest == outputs[0]
    assert digest


def test_two_prepares_at_once_into_one_folder(compiled, tmp_path) -> None:
    """One wins, the other is told to choose another folder, and what is there loads."""
    _, digest, checkpoint, store = compiled
    words = [sys.executable, "-c", PREPARE, str(checkpoint), str(tmp_path / "core"), str(store)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE) for _ in range(2)]
    answers = [(*process.communicate(), process.returncode) for process in running]
    (won,), (lost,) = ([a for a in answers if (a[2] == 0) == good] for good in (True, False))
    assert won[0].splitlines()[-1] == digest
    assert "never changed in place: choose another folder" in lost[1].splitlines()[-1]
    assert load(tmp_path / "core", digest).digest == digest
    assert [p.name for p in tmp_path.iterdir()] == ["core"]


@pytest.fixture(scope="module")
def native_core(compiled, tmp_path_factory):
    """The same layer with the avx engine's own selection, from the same store: (folder, prepared)."""
    from palimpsest.kernels.detect import available_engines

    if "avx" not in available_engines():
        pytest.skip("native programs need numba")
    *_, checkpoint, store = compiled
    layer = plan_layer(checkpoint, context="256", rows="32", ranks="2", page="16", engine="avx")
    folder = tmp_path_factory.mktemp("native") / "core"
    return folder, prepare_core(layer.program, layer.plan, layer.fill, folder, Options(store))


def test_native_core_takes_all_but_its_selection_from_the_store(native_core) -> None:
    folder, made = native_core
    engines = [one["engine"] for one in read((folder / "manifest.json").read_bytes())["programs"].values()]
    assert engines.count("native-avx") == made.programs - made.hits == 2


def test_native_core_qualifies_against_the_eager_avx_engine(compiled, native_core) -> None:
    folder, made = native_core
    report = qualify_core(folder, made.digest, model=compiled[2])
    assert report.passed, report.text()
    assert {"bitwise", "order", "allocations", "selection", "attention"} <= {g.name for g in report.gates}


def test_native_core_rebuilds_from_the_store(compiled, native_core, tmp_path) -> None:
    folder, made = native_core
    assert rebuild_core(folder, tmp_path / "rebuilt", Options(compiled[3])).digest == made.digest


def test_native_core_runs_on_two_ranks_without_palimpsest(native_core, tmp_path) -> None:
    folder, made = native_core
    done = shipped(folder, made.digest, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("output  sha256") == 1
