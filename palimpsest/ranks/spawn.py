"""Real ranks on one host: self-spawned processes under deadlines, or ranks that ``torchrun`` started.

``spawn`` starts one template process that imports torch and the target, and forks the ranks from it. They meet through a file in
a private 0700 folder and talk over loopback only. Whatever happens, including the parent's own death, no process, socket or file
is left.

With ``ranks/`` and ``cli/`` excepted nobody reads the environment; here it is read to start children and to join torchrun.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palimpsest.core.errors import BadConfig
from palimpsest.ranks.board import FileBoard, StoreBoard
from palimpsest.ranks.watch import Log, OnEvent, Watch, process_stat

if TYPE_CHECKING:
    from palimpsest.ranks.torchdist import TorchComm

#: set in every rank: one thread (bits must not depend on it), transports on loopback
_CHILD_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
#: what torchrun sets; a self-spawned rank must not see an outer run's
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankExit:
    """A rank that ended well: its process id and the JSON value its target returned."""

    rank: int
    pid: int
    value: Any


def spawn(
    size: int,
    target: str,
    config: dict[str, Any],
    *,
    deadline_s: float = 60.0,
    start_s: float = 120.0,
    workdir: Path | None = None,
    log: Path | None = None,
    on_event: OnEvent | None = None,
    backend: str = "gloo",
) -> list[RankExit]:
    """Run ``target(comm, config, emit)`` in ``size`` processes and return their results by rank.

    target:     ``package.module:function``; imported once before the ranks fork, so its import must start no thread
    config:     any JSON object; ``emit(event)`` sends one JSON value to ``on_event(rank, event)`` here; the return value is JSON
    deadline_s: seconds a rank may stay in one phase or wait in one call; start_s: seconds for all to connect
    workdir:    where the private folder is made (default: the temporary directory); log: file that gets all output, prefixed

    Raises RankError naming the first failing rank and its phase (``exit_code`` 2 when it raised a UserError); KeyboardInterrupt
    and errors of ``on_event`` pass through. In every case all ranks have ended before this returns.
    """
    if size < 1 or ":" not in target:
        raise BadConfig(
            f"cannot start {size} ranks of {target!r}; give at least 1 rank and a target like package.module:function"
        )
    folder = Path(tempfile.mkdtemp(prefix="palimpsest-ranks-", dir=workdir))
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        board = FileBoard(folder / "board", size, create=True)
        cleanup.callback(board.close)
        book = Log(log, size)
        cleanup.callback(book.close)
        watch = Watch(size, board=board, log=book, deadline_s=deadline_s, start_s=start_s, on_event=on_event)
        cleanup.callback(watch.close)
        job = {"size": size, "target": target, "config": config, "folder": str(folder), "path": sys.path, "backend": backend}
        template = _start_template({**job, "deadline_s": deadline_s, "start_s": start_s}, watch, cleanup)
        cleanup.callback(_stop, template, watch)
        watch.run(lambda rank: _ask_dump(template, rank))
    return [RankExit(rank, watch.pids[rank], watch.values[rank]) for rank in range(size)]


def _start_template(job: dict[str, Any], watch: Watch, cleanup: contextlib.ExitStack) -> "subprocess.Popen[bytes]":
    """Start the template with its pipes: one for output per rank and its own, one for reports per rank."""
    size = job["size"]
    pipes = [os.pipe() for _ in range(2 * size + 1)]
    cleanup.callback(_close_all, [read for read, _ in pipes])
    reads, writes = [read for read, _ in pipes], [write for _, write in pipes]
    try:
        template = subprocess.Popen(
            [sys.executable, "-P", "-m", "palimpsest.ranks.template", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=writes[size],
            pass_fds=writes[:size] + writes[size + 1 :],
            env=_child_environment(),
            start_new_session=True,  # Ctrl-C reaches the parent only, which then ends the ranks
            bufsize=0,
        )
    finally:
        _close_all(writes)
    assert template.stdin
    assert template.stdout
    watch.listen(template.stdout.fileno(), reads[: size + 1], reads[size + 1 :])
    line = json.dumps({**job, "outputs": writes[:size], "reports": writes[size + 1 :]}).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):  # a template that died at once is reported by the watch
        while line:
            line = line[template.stdin.write(line) :]
    return template


def _child_environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    kept = {name: value for name, value in os.environ.items() if name not in _TORCHRUN}
    paths = [root, *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, **_CHILD_ENV, "PYTHONPATH": os.pathsep.join(paths)}


def _ask_dump(template: "subprocess.Popen[bytes]", rank: int) -> None:
    assert template.stdin
    with contextlib.suppress(BrokenPipeError):
        template.stdin.write(b"dump %d\n" % rank)


def _stop(template: "subprocess.Popen[bytes]", watch: Watch) -> None:
    """Closing its stdin makes the template end every rank and itself; if it cannot, its death does."""
    assert template.stdin
    assert template.stdout
    with contextlib.suppress(BrokenPipeError):
        template.stdin.close()
    until = time.monotonic() + 8.0
    while process_stat(template.pid)[0] not in "Z?" and time.monotonic() < until:
        watch.drain(0.1)
    os.kill(template.pid, signal.SIGKILL)  # not yet waited for, so the id is still its own
    _sweep(template.pid)
    template.wait()
    watch.drain(0.0)
    template.stdout.close()


def _sweep(session: int) -> None:
    """End what is left in the template's session: nothing after a normal end, what ranks had started after its sudden death."""
    for _ in range(10):
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != session]
        left = [pid for pid in pids if process_stat(pid)[3] == str(session) and process_stat(pid)[0] not in "ZX"]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def from_environment(*, deadline_s: float = 60.0, start_s: float = 120.0, backend: str = "gloo") -> "TorchComm | None":
    """This process's Comm when ``torchrun`` (or anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) started it,
    else None.

    When all ranks are on this host the transport is kept on loopback unless GLOO_SOCKET_IFNAME says otherwise. Raises RankError
    naming ranks that did not come, BadConfig when the variables are incomplete.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise BadConfig(f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not; start ranks with torchrun, or unset RANK")
    import torch
    import torch.distributed as dist

    from palimpsest.ranks.torchdist import connect

    torch.set_num_threads(1)
    numbers = [os.environ["RANK"], os.environ["WORLD_SIZE"]]
    if not all(number.isdigit() for number in numbers) or int(numbers[0]) >= int(numbers[1]):
        raise BadConfig(
            f"RANK {numbers[0]!r} of WORLD_SIZE {numbers[1]!r} is impossible; start ranks with torchrun, or unset RANK"
        )
    rank, size = map(int, numbers)
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=start_s)))
    board = StoreBoard(dist.PrefixStore("palimpsest", store), size)
    return connect(
        rank, size, dist.PrefixStore("ranks", store), board=board, deadline_s=deadline_s, start_s=start_s, backend=backend
    )
