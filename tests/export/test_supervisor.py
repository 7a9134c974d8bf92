"""Jobs that die, hang or leave children: only they are retried, nobody is left behind, the message says what to do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palimpsest.core.errors import Unavailable
from palimpsest.export.supervisor import GIVE_UP, Job, Supervisor


def job(tmp_path: Path, name: str, code: str) -> Job:
    return Job(name, (sys.executable, "-c", code), tmp_path / f"{name}.log")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, patience: float = 20.0) -> bool:
    end = time.monotonic() + patience
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def test_killed_job_is_retried_and_the_others_go_on(tmp_path) -> None:
    marker = f"pathlib.Path({str(tmp_path)!r}) / 'once'"
    once = f"import os, pathlib\np = {marker}\nif not p.exists(): p.touch(); os.kill(os.getpid(), 9)\n"
    events = []
    Supervisor(2, notify=events.append).run([job(tmp_path, "dies", once), job(tmp_path, "good", "pass")])
    assert [(e.job, e.kind) for e in events if e.kind != "started"].count(("dies", "retry")) == 1
    assert {e.job for e in events if e.kind == "done"} == {"dies", "good"}
    assert any("signal 9" in e.why for e in events)


def test_failure_names_the_job_and_its_last_words(tmp_path) -> None:
    bad = job(tmp_path, "bad", "import sys; print('disk on fire'); sys.exit(3)")
    with pytest.raises(Unavailable, match=r"bad ended with 3 in attempt 2.*disk on fire"):
        Supervisor(1).run([bad])


def test_a_job_that_gives_up_is_not_tried_again(tmp_path) -> None:
    """A full disk stays full: its message is the answer, at once."""
    events = []
    full = job(tmp_path, "full", f"import sys; print('store: No space left; free space'); sys.exit({GIVE_UP})")
    with pytest.raises(Unavailable, match=r"^compiling full: store: No space left; free space$"):
        Supervisor(1, notify=events.append).run([full])
    assert [e.kind for e in events] == ["started", "failed"]


def test_late_job_and_its_grandchild_are_killed(tmp_path) -> None:
    code = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'child').write_text(str(child.pid))\ntime.sleep(600)\n"
    )
    with pytest.raises(Unavailable, match="took more than"):
        Supervisor(1, timeout_s=3.0, retries=0).run([job(tmp_path, "late", code)])
    assert gone(int((tmp_path / "child").read_text()))


def test_grandchild_of_a_finished_job_is_killed(tmp_path) -> None:
    code = (
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'child').write_text(str(child.pid))\n"
    )
    Supervisor(1).run([job(tmp_path, "leaver", code)])
    assert gone(int((tmp_path / "child").read_text()))


def test_workers_end_when_the_supervisor_is_killed(tmp_path) -> None:
    """The worker's own rule (its standard input closes), with a child in the same session."""
    worker = (
        "import pathlib, subprocess, sys, time\nfrom palimpsest.export.worker import leave_with_the_supervisor\n"
        "leave_with_the_supervisor()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdin=subprocess.DEVNULL)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pids').write_text(f'{{__import__(\"os\").getpid()}} {{child.pid}}')\ntime.sleep(600)\n"
    )
    parent = (
        "import pathlib, sys\nfrom palimpsest.export.supervisor import Job, Supervisor\n"
        f"Supervisor(1).run([Job('w', (sys.executable, '-c', {worker!r}), pathlib.Path({str(tmp_path)!r}, 'log'))])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    pids, end = tmp_path / "pids", time.monotonic() + 120
    while not (pids.exists() and pids.read_text().count(" ") == 1) and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert all(gone(int(pid)) for pid in pids.read_text().split())
