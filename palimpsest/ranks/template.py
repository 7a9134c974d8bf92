"""The process that the ranks are forked from: it imports torch and the target once, forks, reports exits, and cleans up.

Started by ``spawn`` as ``python -m palimpsest.ranks.template``. It reads one JSON line (the job) on stdin, then commands: ``dump
RANK`` makes a rank write its stacks to the log; end of file, which is also what the parent's death looks like, ends every rank
and removes the private folder. On its first stdout it writes one JSON line per fact: ``{"started": [pid, ...]}``, ``{"exit":
rank, "status": wait status}``. Nothing is pickled.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from palimpsest.ranks.board import FileBoard
from palimpsest.ranks.failures import raised

_PR_SET_PDEATHSIG = 1
#: seconds between SIGTERM and SIGKILL
_GRACE_MS = 300


class ParentGone(BaseException):
    """The parent died; raised by the signal handler, wherever this process is."""


def _die_with_parent(parent: int, number: int) -> None:
    """Ask the kernel for ``number`` when the parent ends; if it already ended, end here."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        raise ParentGone


def _on_parent_gone(number: int, frame: FrameType | None) -> None:
    raise ParentGone


class Template:
    """The forked ranks, by process file descriptor. ``status`` is the pipe to the parent."""

    def __init__(self, job: dict[str, Any], status: int):
        self.job = job
        self.status = status
        self.board = FileBoard(Path(job["folder"]) / "board", job["size"])
        self.live: dict[int, tuple[int, int]] = {}

    def fork(self, target: Callable[..., Any]) -> None:
        """Fork every rank. Only parents return."""
        job, mine, pids = self.job, os.getpid(), []
        for rank in range(job["size"]):
            pid = os.fork()
            if pid == 0:
                for descriptor in (self.status, *self.live):
                    os.close(descriptor)
                run_rank(rank, mine, job, target=target, board=self.board)
            self.live[os.pidfd_open(pid)] = (rank, pid)
            pids.append(pid)
        for descriptor in job["outputs"] + job["reports"]:
            os.close(descriptor)
        _tell(self.status, {"started": pids})

    def watch(self) -> None:
        """Report exits and obey the parent until no rank is left or the parent closes our stdin."""
        while self.live:
            for descriptor in _readable([0, *self.live]):
                if descriptor:
                    self._reap(descriptor)
                elif not self._obey(os.read(0, 4096)):
                    return

    def _obey(self, commands: bytes) -> bool:
        pids = dict(self.live.values())
        for line in commands.decode().splitlines():
            rank = int(line.removeprefix("dump "))
            if rank in pids:
                os.kill(pids[rank], signal.SIGUSR1)
        return bool(commands)

    def _reap(self, descriptor: int) -> None:
        """The rank is dead but not yet waited for, so its process group still means it: end what it started, then wait."""
        rank, pid = self.live.pop(descriptor)
        os.close(descriptor)
        _signal_group(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            _tell(self.status, {"exit": rank, "status": status})

    def stop(self) -> None:
        """End every rank: SIGTERM, a moment, SIGKILL."""
        for number, wait_ms in ((signal.SIGTERM, _GRACE_MS), (signal.SIGKILL, 5000)):
            for _, pid in self.live.values():
                _signal_group(pid, number)
            while self.live and (gone := _readable(list(self.live), wait_ms)):
                for descriptor in gone:
                    self._reap(descriptor)


def _readable(descriptors: list[int], timeout_ms: int | None = None) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout_ms)]


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _tell(descriptor: int, fact: dict[str, Any]) -> None:
    data = json.dumps(fact).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


class _Report:
    """Ends the rank: whatever happened inside goes to the parent as one JSON line, then the process exits at once.

    At once, because transports may still hold the caller's memory and a peer may be stuck: nothing may run between here and the
    exit.
    """

    def __init__(self, rank: int, descriptor: int, board: FileBoard):
        self._rank = rank
        self._to = descriptor
        self._board = board

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> NoReturn:
        if error is not None:
            traceback.print_exception(error)
            failure = raised(self._rank, self._board.read(self._rank).phase, error)
            fact = {"rank": failure.rank, "phase": failure.phase, "message": failure.message, "type": type(error).__name__}
            _tell(self._to, {"error": {**fact, "exit_code": failure.exit_code, "secondary": failure.secondary}})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if error is None else 1)


def run_rank(rank: int, template: int, job: dict[str, Any], *, target: Callable[..., Any], board: FileBoard) -> NoReturn:
    """The whole life of a forked rank: own group, own output, connect, ``target(comm, config, emit)``, report, exit."""
    report, folder = job["reports"][rank], Path(job["folder"])
    with _Report(rank, report, board):
        _become_rank(rank, template, job)
        import torch.distributed as dist

        from palimpsest.ranks.torchdist import connect

        store = dist.FileStore(str(folder / "store"), job["size"])
        times = {"deadline_s": job["deadline_s"], "start_s": job["start_s"]}
        comm = connect(rank, job["size"], store, board=board, backend=job["backend"], **times)
        value = target(comm, job["config"], lambda event: _tell(report, {"event": event}))
        comm.enter("end")
        comm.barrier("end")
        _tell(report, {"done": value})
    raise AssertionError("a rank's report ends its process")


def _become_rank(rank: int, template: int, job: dict[str, Any]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.setpgid(0, 0)
    _die_with_parent(template, signal.SIGKILL)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    output = job["outputs"][rank]
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in job["outputs"] + [d for d in job["reports"] if d != job["reports"][rank]]:
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _load(target: str) -> Callable[..., Any]:
    """``package.module:function``. Errors are the interpreter's own: they end this process and reach the log."""
    module, _, name = target.partition(":")
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _read_job() -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 20)
        if not piece:
            raise ParentGone
        line += piece
    job: dict[str, Any] = json.loads(line)
    return job


def main(parent: int) -> int:
    """Read the job, fork, watch; clean up when the parent goes first."""
    signal.signal(signal.SIGHUP, _on_parent_gone)
    status = os.dup(1)
    os.dup2(2, 1)  # what an import prints belongs in the log
    template: Template | None = None
    folder = ""
    try:
        _die_with_parent(parent, signal.SIGHUP)
        job = _read_job()
        folder = job["folder"]
        sys.path[:] = job["path"]
        target = _load(job["target"])
        gc.collect()
        gc.freeze()  # forked ranks share these pages: keep the collector from writing to them
        template = Template(job, status)
        template.fork(target)
        template.watch()
    except ParentGone:
        pass
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if template is not None:
            template.stop()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
