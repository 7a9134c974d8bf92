"""``prepare`` killed, refused by the disk, or raced at every moment: no half core, no half entry, older cores as they were.

Every moment means every operation on the file system: an audit hook counts them and strikes at number k, for every k. The runs
are forks of one process that already holds torch and the looked-up programs, so each costs a fraction of a second. Programs here
are placeholders, which prepare copies and hashes and never runs; ``test_compiled.py`` kills runs that compile real ones.
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from palimpsest.checkpoint.make import make
from palimpsest.core.errors import BadConfig, Unavailable
from palimpsest.export import manifest, prepare
from palimpsest.export.checkpoint import plan_layer
from palimpsest.export.prepare import Options, prepare_core
from palimpsest.export.store import Store
from palimpsest.kernels.sizes import KEY_TILE
from palimpsest_loader.manifest import read

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("interrupted"), pytest.mark.timeout(900)]
#: audit events that change the file system; ``open`` counts when it is for writing
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate", "shutil.copyfile"}


def stock(jobs, options, say) -> None:
    """In place of the compilers: the store gets a placeholder for every job, under its real key."""
    for job in jobs:
        facts = json.loads(Path(job.command[-1]).read_text())
        source = Path(facts["template"])
        Store(options.store).publish(facts["key"], source, source.read_bytes(), {"scratch_bytes": 0})


@pytest.fixture(scope="module")
def stocked(tmp_path_factory):
    """A checkpoint, and a store that holds a placeholder for each of its programs."""
    folder = tmp_path_factory.mktemp("interrupted")
    make("tiny-k31", folder / "model", overrides={"topk": 16})
    layer = plan_layer(folder / "model", context="256", rows="32", ranks="2", page="16")
    options = Options(folder / "store")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "run_jobs", stock)
        first = prepare_core(layer.program, layer.plan, layer.fill, folder / "older", options)
    found = prepare.compile_programs(
        layer.program, layer.plan, prepare.build(layer.program), prepare.find(None), options, lambda *_: None
    )
    assert found[1] == len(found[0])
    return SimpleNamespace(layer=layer, options=options, older=folder / "older", digest=first.digest, found=found)


def whole(core: Path, digest: str) -> None:
    """Every file of ``core`` is there with its hash, and nothing else."""
    data = (core / manifest.NAME).read_bytes()
    assert hashlib.sha256(data).hexdigest() == digest
    files = read(data)["files"]
    assert {str(p.relative_to(core)) for p in core.rglob("*") if p.is_file()} == {*files, manifest.NAME}
    for name, fact in files.items():
        assert hashlib.sha256((core / name).read_bytes()).hexdigest() == fact["sha256"], name


def sound(stocked, output: Path) -> bool:
    """Asserts what must hold after anything; whether ``output`` was published."""
    whole(stocked.older, stocked.digest)
    store = Store(stocked.options.store)
    assert all(store.get(p.name) for p in store.root.iterdir() if not p.name.startswith("."))
    if output.exists():
        whole(output, stocked.digest)
    return output.exists()


def forked(body) -> int:
    """Exit status of a fork that runs ``body``: 0, 1 for an exception that says too little, minus the signal."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def struck(at: int, strike):
    """From now on count the operations of this process; ``strike`` at number ``at``. Returns the counter."""
    seen = [0]

    def hook(event: str, args) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in CHANGES:
            seen[0] += 1
            if seen[0] == at:
                strike()

    def counted(function):
        def call(*args):
            hook("os.mkdir", ())
            return function(*args)

        return call

    sys.addaudithook(hook)
    os.fsync, os.posix_fallocate = counted(os.fsync), counted(os.posix_fallocate)  # in a fork: gone with it
    return seen


def run(stocked, output: Path):
    """The part of ``prepare`` behind the look-up of programs, which is where it writes."""
    prepare.compile_programs = lambda *_: stocked.found  # in a fork: gone with it
    layer = stocked.layer
    return prepare_core(layer.program, layer.plan, layer.fill, output, stocked.options)


def test_killed_at_every_operation(stocked, tmp_path) -> None:
    output, kills, published = tmp_path / "core", 0, 0

    def body(at: int) -> None:
        struck(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
        run(stocked, output)

    while (code := forked(partial(body, kills + 1))) == -signal.SIGKILL:
        kills += 1
        if sound(stocked, output):
            published += 1
            shutil.rmtree(output)
    assert code == 0
    assert sound(stocked, output)
    assert kills > 3 * 12  # at least the folder, the copies and the manifest of twelve programs
    # every later run swept what a killed one left; the last one left nothing
    assert [p.name for p in tmp_path.iterdir()] == ["core"]
    assert published <= 2  # killed behind the rename


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_the_disk_refuses_every_operation(stocked, tmp_path, code: int) -> None:
    """Each operation fails once; the message names the place and the next step, and only what had been published is there."""
    at, refused = 1, 0
    while True:
        output = tmp_path / f"core{at}"
        log = tmp_path / f"log{at}"

        def body(output=output, log=log, at=at) -> None:
            def strike() -> None:
                raise OSError(code, os.strerror(code))

            seen = struck(at, strike)
            try:
                run(stocked, output)
            except (Unavailable, BadConfig) as error:
                text = str(error)
            else:
                text = "published"
            reached, seen[0] = seen[0] >= at, 1 << 60
            log.write_text(f"{reached} {text}")

        assert forked(body) == 0, f"operation {at}: not an error of ours"
        reached, text = log.read_text().split(" ", 1)
        log.unlink()
        there = sound(stocked, output)
        if reached == "False":
            assert there
            break
        assert there == text.startswith(("published", f"{output} is published and whole")), text
        assert there or os.strerror(code) in text
        if not there:
            refused += 1
            assert "nothing was published, free space or choose another folder" in text
            assert str(output) in text or f".{output.name}.new-" in text
        assert [p.name for p in tmp_path.iterdir()] == ([output.name] if there else [])
        shutil.rmtree(output, ignore_errors=True)
        at += 1
    assert refused > 3 * 12


def refusal(body) -> str:
    """What ``body`` was refused with, empty when it was not."""
    try:
        body()
    except (BadConfig, Unavailable) as error:
        return str(error)
    return ""


def limited(folder: Path, nbytes: int) -> bool:
    """Mount a file system of ``nbytes`` at ``folder`` that only this process sees and that ends with it; False if not allowed."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(0x10020000):  # CLONE_NEWUSER | CLONE_NEWNS
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError:
        return False
    return libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, f"size={nbytes}".encode()) == 0


def test_a_full_disk_at_every_size(stocked, tmp_path) -> None:
    """A real file system, too small by less and less, with the older core on it. 0 refused, 3 published, 4 not allowed here."""
    size = sum(p.stat().st_size for p in stocked.older.rglob("*") if p.is_file())
    disk, page = tmp_path / "disk", os.sysconf("SC_PAGE_SIZE")
    disk.mkdir()

    def body(nbytes: int) -> None:
        if not limited(disk, nbytes):
            os._exit(4)
        shutil.copytree(stocked.older, disk / "older")
        stocked.older = disk / "older"
        text = refusal(partial(run, stocked, disk / "core"))
        if text:
            assert "No space left on device" in text
            assert "free space or choose another folder" in text
            assert not sound(stocked, disk / "core")
            assert [p.name for p in disk.iterdir()] == ["older"]
            return
        assert sound(stocked, disk / "core")
        os._exit(3)

    found = []
    for step in range(17):  # from no room beside the older core to room for twice it, and a page for every file and folder
        found.append(forked(partial(body, size + 64 * page + size * step // 8)))
        if found == [4]:
            pytest.skip("this machine lets nobody mount a file system in a namespace of its own")
        if found[-1] == 3:
            break
    assert set(found[:-1]) == {0}, found
    assert found[-1] == 3, found
    assert len(found) > 4, found
    assert list(disk.iterdir()) == []


def test_a_full_disk_under_the_store(stocked, tmp_path) -> None:
    """Publishing compiled programs until nothing fits: earlier entries stay, the refused one leaves nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def body() -> None:
        if not limited(disk, 1 << 20):
            os._exit(4)
        source = tmp_path / "program"
        source.write_bytes(os.urandom(200_000))
        store, keys = Store(disk / "store"), []
        for number in range(10):
            text = refusal(partial(store.publish, f"{number}" * 64, source, b"{}", {}))
            if text:
                break
            keys.append(f"{number}" * 64)
        assert "No space left on device; free space or choose another folder with --store" in text
        assert keys
        assert sorted(p.name for p in store.root.iterdir()) == keys
        assert all(store.get(key) for key in keys)
        shutil.rmtree(store.root / keys.pop())
        assert store.publish("f" * 64, source, b"{}", {}).program.stat().st_size == 200_000

    code = forked(body)
    if code == 4:
        pytest.skip("this machine lets nobody mount a file system in a namespace of its own")
    assert code == 0


def test_two_runs_for_one_folder_one_wins(stocked, tmp_path) -> None:
    """Both have written everything and both saw the folder free; only then either may rename."""
    output, arrived, go = tmp_path / "core", os.pipe(), os.pipe()

    def body() -> None:
        import fcntl

        def hook(event: str, args) -> None:
            if event == "os.rename" and str(args[1]) == str(output):
                os.write(arrived[1], b"x")
                os.read(go[0], 1)

        sys.addaudithook(hook)
        text = refusal(partial(run, stocked, output)) or "published"
        with (tmp_path / "answers").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(text + "\n")

    pids = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            try:
                body()
            finally:
                os._exit(0)
        pids.append(pid)
    got = b""
    while len(got) < 2:
        got += os.read(arrived[0], 2)
    os.write(go[1], b"xx")
    for pid in pids:
        os.waitpid(pid, 0)
    for end in (*arrived, *go):
        os.close(end)
    answers = sorted((tmp_path / "answers").read_text().splitlines(), key=len)
    assert answers[0] == "published"
    assert "never changed in place: choose another folder" in answers[1]
    assert sound(stocked, output)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers", "core"]


def test_two_runs_with_one_store_and_two_folders(stocked, tmp_path) -> None:
    """Whole processes with the real look-up, at once."""
    code = (
        "import sys, warnings; warnings.filterwarnings('ignore')\nfrom pathlib import Path\n"
        "from palimpsest.export.checkpoint import plan_layer\nfrom palimpsest.export.prepare import Options, prepare_core\n"
        "model, output, store = map(Path, sys.argv[1:])\n"
        "layer = plan_layer(model, context='256', rows='32', ranks='2', page='16')\n"
        "made = prepare_core(layer.program, layer.plan, layer.fill, output, Options(store))\n"
        "print(made.digest, made.programs - made.hits)\n"
    )
    model = stocked.older.parent / "model"
    words = [[sys.executable, "-c", code, str(model), str(tmp_path / n), str(stocked.options.store)] for n in ("one", "two")]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in words]
    for process in running:
        out, err = process.communicate(timeout=300)
        assert out.split() == [stocked.digest, "0"], err
    assert sound(stocked, tmp_path / "one")
    assert sound(stocked, tmp_path / "two")


def test_a_longer_context_compiles_nothing(stocked, tmp_path, monkeypatch) -> None:
    """Programs work on tiles: once the context holds a whole key tile, every other context finds all of them in the store."""
    model, options, compiled = stocked.older.parent / "model", Options(tmp_path / "store"), []

    def count(jobs, options, say) -> None:
        compiled.extend(job.name for job in jobs)
        stock(jobs, options, say)

    monkeypatch.setattr(prepare, "run_jobs", count)
    for context in (str(KEY_TILE), "64K", "1M"):
        layer = plan_layer(model, context=context, rows="32", ranks="2", page="16")
        made = prepare_core(layer.program, layer.plan, layer.fill, tmp_path / context, options)
        whole(tmp_path / context, made.digest)
        assert made.hits == (0 if context == str(KEY_TILE) else made.programs)
    assert len(compiled) == made.programs
