"""What a run leaves where others can see it: folders, files, environment, paths, sockets, processes."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from palimpsest.checkpoint.make import make
from palimpsest.core.errors import UserError
from palimpsest.core.spec import Limits
from palimpsest.prove import record
from palimpsest.prove.evidence import EvidenceFolder, new_run_id
from palimpsest.prove.qualify import Request, prepare_setup

ROOT = Path(__file__).parents[2]
#: audit events that a reader of files may not raise; open() is looked at by mode
FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "pickle.",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "shutil.",
)
AUDITED = """
import json, sys
seen = []
def hook(event, args):
    if event.startswith(%r):
        seen.append(f"{event} {args[0]}" if event.startswith("os.") else event)
    elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+") and "__pycache__" not in str(args[0]):
        seen.append(f"open {args[0]} {args[1]}")
from palimpsest.cli.main import main
sys.modules["omnimalloc"] = None  # the extra imports matplotlib, which makes folders in the user's home
sys.addaudithook(hook)
code = main(%r)
print("AUDIT", json.dumps([code, seen]), file=sys.stderr)
"""


def audited(words: list[str], cwd: Path) -> tuple[int, list[str]]:
    code = AUDITED % (FORBIDDEN, words)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, env=env, check=False
    )
    line = next((line for line in done.stderr.splitlines() if line.startswith("AUDIT ")), None)
    assert line, done.stderr
    return tuple(json.loads(line[6:]))


def test_planning_reads_one_file_and_touches_nothing_else(tmp_path: Path) -> None:
    """No socket, no process, no write: the interpreter's own audit events say so."""
    make("micro", tmp_path / "model")
    for words in (["plan", "glm-5.2", "--context", "64K"], ["plan", "model", "--context", "4K"], ["preflight", "model"]):
        assert audited(words, tmp_path) == (0, []), words


def test_the_audit_can_fail(tmp_path: Path) -> None:
    _, seen = audited(["checkpoint", "make", "micro", "made"], tmp_path)
    assert any(event.startswith("open ") for event in seen)
    assert any(event.startswith("os.rename ") for event in seen)


@pytest.mark.parametrize("tokens", ["1152921504606846976", "-1", "1.5", "0", "1e9", "9" * 400])
def test_impossible_sizes_are_refused_before_anything_is_allocated(tokens: str, tmp_path: Path) -> None:
    """2**60 tokens are 664 PiB of plan: one line, exit code 2, in an address space of 1 GiB."""
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        f"from palimpsest.cli.main import main\nraise SystemExit(main(['plan', 'glm-5.2', '--context={tokens}']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 or "usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_limits_bound_what_a_program_may_ask_for() -> None:
    for tokens in (1 << 60, (1 << 31) + 64, -64, 64.0, True):
        with pytest.raises(UserError):
            Limits(tokens, 1, 1)  # type: ignore[arg-type]


@pytest.fixture
def open_umask():
    """A caller whose umask hides nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_working_folders_are_private_whatever_the_umask(open_umask, tmp_path: Path) -> None:
    model = make("tiny-k31", tmp_path / "model")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    prepare_setup(Request(model=model, ranks=2), model, private)
    assert mode(private / "ranks") == 0o700
    with EvidenceFolder(tmp_path / "evidence", new_run_id()) as folder:
        assert mode(folder.work) == 0o700
        folder.write("log.txt", "whatever the ranks printed")
        assert mode(folder.publish()) == 0o700


def test_an_evidence_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    root = tmp_path / "evidence"

    def interrupted() -> None:
        with EvidenceFolder(root, new_run_id()) as folder:
            folder.write("record.json", "{}")
            assert [p.name for p in root.iterdir()] == [folder.work.name]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not root.exists()


def test_no_unlisted_variable_and_no_absolute_path_in_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {
        "SECRET": "hunter2",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUt",
        "HF_TOKEN": "hf_abc",
        "OMP_NUM_THREADS": "1",
        "HOME": "/home/someone",
    }
    listed, digest = record.environment_facts(secret)
    assert listed == {"OMP_NUM_THREADS": "1"}
    assert len(digest) == 64
    monkeypatch.chdir(tmp_path)
    text = json.dumps(
        [record.machine_facts(), record.installed_facts(), record.source_facts(), record.relative_folder(tmp_path / "x"), listed]
    )
    for value in ("hunter2", "wJalrXUt", "hf_abc", "/home/someone", str(tmp_path), str(Path.home()) + "/"):
        assert value not in text
    assert record.relative_folder(Path("/elsewhere/model")) == "model"
