"""Real ranks under attack: killed, stopped, hung, orphaned, visited by strangers; nothing is left behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from palimpsest.core.errors import BadConfig, RankError

pytestmark = pytest.mark.ranks
HERE = Path(__file__).parent


def _gone(pids: list[int], within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _listeners(pids: list[int]) -> list[tuple[str, int]]:
    """Listening addresses of the processes, from the kernel's tables."""
    found = []
    for pid in pids:
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.append((connection.laddr.ip, connection.laddr.port))
    return found


def test_sixteen_ranks_are_distinct_single_threaded_processes_with_a_log(real, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    values = real(16, "everything_legal", log=log)
    assert [value["wrong"] for value in values] == [[]] * 16
    assert len({value["pid"] for value in values} | {os.getpid()}) == 17
    assert {value["threads"] for value in values} == {1}
    lines = log.read_text().splitlines()
    assert {f"[rank {rank:02d}] output of {rank}" for rank in range(16)} <= set(lines)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("SIGKILL", "died: killed by SIGKILL"),
        ("SIGSEGV", "died: killed by SIGSEGV"),
        ("exit", "died: exited with code 0 without a result"),
    ],
)
def test_a_dead_rank_is_named_while_the_others_wait(real, how: str, words: str) -> None:
    pids = []
    begun = []

    def on_event(rank: int, event: dict) -> None:
        pids.append(event["pid"])
        begun.append(time.monotonic())

    with pytest.raises(RankError) as caught:
        real(4, "fail", {"rank": 2, "how": how}, deadline_s=60, on_event=on_event)
    assert (caught.value.rank, caught.value.phase) == (2, "p6")
    assert words in str(caught.value)
    assert time.monotonic() - begun[0] < 30, "noticed long before the deadline"
    assert len(pids) == 4
    assert _gone(pids)


@pytest.mark.parametrize("how", ["SIGSTOP", "sleep"])
def test_a_rank_past_its_deadline_is_named(real, how: str) -> None:
    pids = []
    with pytest.raises(RankError, match="late") as caught:
        real(3, "fail", {"rank": 1, "how": how}, deadline_s=3, on_event=lambda rank, event: pids.append(event["pid"]))
    assert (caught.value.rank, caught.value.phase) == (1, "p6")
    assert _gone(pids)


def test_a_user_error_keeps_its_exit_code_and_its_traceback_is_in_the_log(real, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with pytest.raises(RankError, match=r"rank 1 in p6: BadCheckpoint: shard 3 is short; output in .*log\.txt") as caught:
        real(2, "fail", {"rank": 1, "how": "user"}, log=log)
    assert caught.value.exit_code == 2
    assert '[rank 01]     raise BadCheckpoint("shard 3 is short")' in log.read_text()


def test_a_hung_run_of_one_leaves_its_stack_in_the_log(real, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with pytest.raises(RankError, match="rank 0 in p6: late"):
        real(1, "fail", {"rank": 0, "how": "sleep"}, deadline_s=2, log=log)
    assert "behaviours.py" in log.read_text()


def test_a_target_that_cannot_be_imported_is_reported(real) -> None:
    with pytest.raises(RankError, match=r"rank 0 in start: .*no_such_behaviour"):
        real(2, "no_such_behaviour")


def test_bad_arguments_start_nothing(real) -> None:
    with pytest.raises(BadConfig, match="0 ranks"):
        real(0, "idle")


def test_an_error_in_the_parent_ends_the_ranks(real) -> None:
    pids = []

    def on_event(rank: int, event: dict) -> None:
        pids.extend([event["pid"], event["helper"]])
        if len(pids) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        real(2, "idle", on_event=on_event)
    assert len(pids) == 4
    assert _gone(pids), "the ranks and the processes they started"


_PARENT = """
import json, sys
from pathlib import Path
from palimpsest.ranks.spawn import spawn
spawn(2, "behaviours:idle", {}, workdir=Path(sys.argv[1]), on_event=lambda rank, event: print(json.dumps(event), flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_do_not_outlive_their_parent(tmp_path: Path, number: int) -> None:
    paths = os.pathsep.join([str(HERE), *sys.path])
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    ) as parent:
        assert parent.stdout
        events = [json.loads(parent.stdout.readline()) for _ in range(2)]
        pids = [pid for event in events for pid in event.values()]
        template = psutil.Process(pids[0]).ppid()
        assert not _gone(pids, within_s=0.1)
        parent.send_signal(number)
        parent.wait(20)
    assert _gone([*pids, template])
    until = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_the_template_killed_ends_the_run(real) -> None:
    pids = []

    def on_event(rank: int, event: dict) -> None:
        pids.extend([event["pid"], event["helper"]])
        if len(pids) == 4:
            os.kill(psutil.Process(event["pid"]).ppid(), signal.SIGKILL)

    with pytest.raises(RankError, match="the process that starts the ranks ended first"):
        real(2, "idle", on_event=on_event, deadline_s=60)
    assert _gone(pids)


def test_strangers_on_the_listeners_change_nothing_and_no_listener_leaves_loopback(real, tmp_path: Path) -> None:
    stop, pids, listeners = tmp_path / "stop", [], []
    sockets: list[socket.socket] = []

    def visit() -> None:
        listeners.extend(_listeners(pids))
        for address in listeners:
            for garbage in (b"", b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", bytes(8)):
                stranger = socket.create_connection(address, timeout=5)
                sockets.append(stranger)
                with contextlib.suppress(OSError):
                    stranger.sendall(garbage)
        time.sleep(0.3)
        stop.touch()

    visitor = threading.Thread(target=visit)

    def on_event(rank: int, event: dict) -> None:
        pids.append(event["pid"])
        if len(pids) == 4:
            visitor.start()

    try:
        assert len(set(real(4, "wait_for_file", {"stop": str(stop)}, deadline_s=20, on_event=on_event))) == 1
    finally:
        visitor.join()
        for stranger in sockets:
            stranger.close()
    assert listeners
    assert {host for host, _ in listeners} <= {"127.0.0.1", "::1"}


def test_a_connection_that_cannot_prove_itself_is_refused(real) -> None:
    with pytest.raises(RankError, match=r"in connect: the connection to rank \d did not prove that it belongs to this run"):
        real(3, "forged", deadline_s=20)


def test_one_rank_opens_no_socket(real, tmp_path: Path) -> None:
    stop, found = tmp_path / "stop", []

    def on_event(rank: int, event: dict) -> None:
        found.extend(psutil.Process(event["pid"]).net_connections("inet"))
        stop.touch()

    real(1, "idle_once", {"stop": str(stop)}, on_event=on_event)
    assert found == []


_TORCHRUN = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import behaviours
from palimpsest.ranks.spawn import from_environment
comm = from_environment(deadline_s=20)
value = behaviours.everything_legal(comm, {}, lambda event: None)
comm.barrier("end")
print(json.dumps({"rank": comm.rank, **value}), flush=True)
comm.close()
"""


def test_torchrun_ranks_join(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(_TORCHRUN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    values = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(value["rank"] for value in values) == [0, 1]
    assert all(value["wrong"] == [] for value in values)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK '2' of WORLD_SIZE '2'"),
    ],
)
def test_half_a_torchrun_environment_is_refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    from palimpsest.ranks.spawn import from_environment

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert from_environment() is None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadConfig, match=words):
        from_environment()
