"""Comm over torch.distributed: real processes, on one host or several (gloo; the backend is a parameter).

Every message travels with a 64-byte header naming the call, its label and its sizes, so two ranks that disagree are told apart
from a slow one. Nothing is allocated after ``connect``: payloads are sent from and received into the caller's views, headers into
buffers made here. Each call has one deadline; who missed it is read from the board.
"""

import hashlib
import secrets
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from palimpsest.core.errors import RankError
from palimpsest.ranks.board import Board, Progress, Reporter, late_rank
from palimpsest.ranks.comm import group_by_peer
from palimpsest.ranks.failures import disagreement, mismatch, parcel

#: call, messages, bytes, digest of label and sizes, start of the label
_HEADER = struct.Struct("<IIQ8s40s")
HEADER_BYTES = _HEADER.size
#: length of the text in bytes, its sha256, its start
_TEXT = struct.Struct("<Q32s984s")
TEXT_BYTES = _TEXT.size
_CALLS = ("exchange", "barrier", "agree")


def _header(call: str, label: str, sizes: list[int]) -> bytes:
    digest = hashlib.blake2b(f"{label}\0{sizes}".encode(), digest_size=8).digest()
    return _HEADER.pack(_CALLS.index(call), len(sizes), sum(sizes), digest, label.encode()[:40])


def _describe(header: bytes) -> str:
    """What a header says, for an error message; bytes that are no header say so."""
    call, count, total, _, label = _HEADER.unpack(header)
    name = _CALLS[call] if call < len(_CALLS) else f"unknown call {call}"
    text = label.rstrip(b"\0").decode(errors="replace")
    return f"{name} {text!r} of {count} message{'s' if count != 1 else ''}, {total} bytes"


def _proof(token: bytes, sender: int, receiver: int) -> bytes:
    return hashlib.blake2b(f"{sender} to {receiver}".encode(), key=token, digest_size=HEADER_BYTES).digest()


class Rows:
    """Fixed message buffers: rows of bytes that torch can send from and receive into."""

    def __init__(self, rows: int, width: int):
        self._raw = bytearray(rows * width)
        self._width = width
        self.all = torch.frombuffer(self._raw, dtype=torch.uint8)
        self.views = list(self.all.view(rows, width))

    def __getitem__(self, row: int) -> bytes:
        return bytes(self._raw[row * self._width : (row + 1) * self._width])

    def __setitem__(self, row: int, value: bytes) -> None:
        assert len(value) == self._width
        self._raw[row * self._width : (row + 1) * self._width] = value

    def of(self, peers: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        return [(peer, self.views[peer]) for peer in peers]


class TorchComm:
    """One rank over a torch.distributed process group; see ``Comm`` for the calls. Made by ``connect``.

    Memory made here, in bytes: ``2 * size * 64`` for headers and ``(size + 2) * 1024`` for agreements.
    """

    def __init__(self, rank: int, size: int, *, deadline_s: float, board: Board):
        self.rank = rank
        self.size = size
        self.deadline_s = deadline_s
        self._board = board
        self._pen = Reporter(board, rank)
        self._until = 0.0
        self._out = Rows(size, HEADER_BYTES)
        self._in = Rows(size, HEADER_BYTES)
        self._texts = Rows(size, TEXT_BYTES)
        # rank 0's text, then that of the first rank that differs
        self._verdict = Rows(2, TEXT_BYTES)

    # -- the protocol

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], label: str
    ) -> None:
        outgoing = group_by_peer(self.rank, self.size, sends)
        incoming = group_by_peer(self.rank, self.size, receives)
        self._begin("exchange", label)
        for peer, tensors in outgoing.items():
            self._out[peer] = _header("exchange", label, _sizes(tensors))
        headers = [dist.P2POp(dist.irecv, self._in.views[peer], peer) for peer in incoming]
        leaving = [dist.P2POp(dist.isend, self._out.views[peer], peer) for peer in outgoing]
        leaving += [dist.P2POp(dist.isend, _flat(t), peer) for peer, tensors in outgoing.items() for t in tensors]
        works = self._start([*headers, *leaving])
        for (peer, tensors), work in zip(incoming.items(), works, strict=False):
            self._wait(work, peer)
            self._compare("exchange", label, peer, sizes=_sizes(tensors))
        # only now: gloo ends the whole process when a message is longer than the receive that was posted for it
        arriving = [dist.P2POp(dist.irecv, _flat(t), peer) for peer, tensors in incoming.items() for t in tensors]
        for operation, work in zip([*leaving, *arriving], [*works[len(headers) :], *self._start(arriving)], strict=True):
            self._wait(work, operation.peer)
        self._pen.done()

    def barrier(self, label: str) -> None:
        """A dissemination barrier: after round i every rank has heard, through others, from 2**(i+1) ranks."""
        self._begin("barrier", label)
        step = 1
        while step < self.size:
            target, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            self._out[target] = _header("barrier", label, [])
            self._move(receives=[(source, self._in.views[source])], sends=[(target, self._out.views[target])])
            self._compare("barrier", label, source, sizes=[])
            step *= 2
        self._pen.done()

    def agree(self, label: str, text: str) -> None:
        """Rank 0 collects every rank's text, compares, and tells all: every rank raises the same error or none does."""
        self._begin("agree", label)
        raw = text.encode()
        self._texts[self.rank] = _TEXT.pack(len(raw), hashlib.sha256(raw).digest(), raw[: TEXT_BYTES - 40])
        peers = range(1, self.size) if self.rank == 0 else range(1)
        for peer in peers:
            self._out[peer] = _header("agree", label, [TEXT_BYTES])
        self._move(receives=self._in.of(peers), sends=self._out.of(peers))
        for peer in peers:
            self._compare("agree", label, peer, sizes=[TEXT_BYTES])
        if self.rank == 0:
            self._move(receives=self._texts.of(peers))
            first = next((r for r in range(self.size) if self._texts[r] != self._texts[0]), 0)
            self._verdict[0], self._verdict[1] = self._texts[0], self._texts[first]
            for peer in peers:
                self._out[peer] = _header("agree", label, [first])
            self._move(sends=[*self._out.of(peers), *((peer, self._verdict.all) for peer in peers)])
        else:
            self._move(sends=[(0, self._texts.views[self.rank])])
            self._move(receives=[(0, self._in.views[0]), (0, self._verdict.all)])
            first = _HEADER.unpack(self._in[0])[2]
        if first:
            phase = self._board.read(first).phase
            raise disagreement(first, phase, label, theirs=_excerpt(self._verdict[1]), reference=_excerpt(self._verdict[0]))
        self._pen.done()

    def enter(self, phase: str) -> None:
        self._pen.enter(phase)

    def greet(self, token: bytes) -> None:
        """Prove to every peer, and be shown by every peer, knowledge of the run's token.

        The transport believes whoever connects with the right small number. Each connection stays with its pair for the whole
        run, so one proof at the start is enough; it depends on the direction, so that an intruder who is shown one cannot show
        it on.
        """
        self._begin("exchange", "greeting")
        peers = [peer for peer in range(self.size) if peer != self.rank]
        for peer in peers:
            self._out[peer] = _proof(token, self.rank, peer)
        self._move(receives=self._in.of(peers), sends=self._out.of(peers))
        for peer in peers:
            if self._in[peer] != _proof(token, peer, self.rank):
                intruder = (
                    f"the connection to rank {peer} did not prove that it belongs to this run; another process took its place"
                )
                raise RankError(intruder, rank=self.rank, phase=self._pen.now.phase)
        self._pen.done()

    def close(self) -> None:
        """Leave the process group; the rank must not be used afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- moving and waiting

    def _begin(self, call: str, label: str) -> None:
        self._pen.call(f"{call} {label}")
        self._until = time.monotonic() + self.deadline_s

    def _move(self, *, receives: Sequence[tuple[int, torch.Tensor]] = (), sends: Sequence[tuple[int, torch.Tensor]] = ()) -> None:
        operations = [dist.P2POp(dist.irecv, view, peer) for peer, view in receives]
        operations += [dist.P2POp(dist.isend, view, peer) for peer, view in sends]
        for operation, work in zip(operations, self._start(operations), strict=True):
            self._wait(work, operation.peer)

    def _start(self, operations: list[Any]) -> list[Any]:
        if not operations:
            return []
        with _Lost(self, operations[0].peer):
            return dist.batch_isend_irecv(operations)

    def _wait(self, work: Any, peer: int) -> None:
        self._pen.wait_for(peer)
        with _Lost(self, peer):
            work.wait(timedelta(seconds=max(self._until - time.monotonic(), 0.001)))

    def _compare(self, call: str, label: str, peer: int, *, sizes: list[int]) -> None:
        found, expected = self._in[peer], _header(call, label, sizes)
        if found != expected:
            phase = self._pen.now.phase
            raise mismatch(peer, self.rank, phase, sent=_describe(found), expected=parcel(call, label, sizes))

    def failed_wait(self, peer: int, error: RuntimeError) -> RankError:
        """A wait that broke: past the deadline somebody is late, before it the peer vanished."""
        call = self._pen.now.call
        if time.monotonic() < self._until - 0.01:  # the transport counts whole milliseconds
            lost = f"lost rank {peer} while waiting in {call}: {_first_line(error)}"
            return RankError(lost, rank=self.rank, phase=self._pen.now.phase, secondary=True)
        return late(self._board, call, self.deadline_s, waiter=self.rank, peer=peer)


def late(board: Board, call: str, deadline_s: float, *, waiter: int, peer: int) -> RankError:
    """Name the rank that keeps the others waiting."""
    records = [board.read(r) for r in range(board.size)]
    slow = late_rank([record if r != waiter else Progress(1 << 62, 1, True) for r, record in enumerate(records)], peer)
    others = "; ".join(f"rank {r} {record}" for r, record in enumerate(records) if r != waiter)
    message = f"late: rank {waiter} waited {deadline_s:g} s in {call} ({others}); raise the deadline if the rank was only slow"
    return RankError(message, rank=slow, phase=records[slow].phase, secondary=True)


class _Lost:
    """Turns the transport's RuntimeError into a RankError that names a rank."""

    def __init__(self, comm: TorchComm, peer: int):
        self._comm = comm
        self._peer = peer

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, RankError):
            raise self._comm.failed_wait(self._peer, error) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]


def _sizes(tensors: list[torch.Tensor]) -> list[int]:
    return [t.numel() * t.element_size() for t in tensors]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as flat u8: the transports know neither fp8 nor, all of them, bf16."""
    return tensor.reshape(-1).view(torch.uint8)


def _excerpt(row: bytes) -> str:
    length, digest, start = _TEXT.unpack(row)
    text = start.rstrip(b"\0").decode(errors="replace")
    return text if length <= len(start) else f"{text[:80]}... ({length} bytes, sha256 {digest.hex()[:16]})"


def connect(
    rank: int, size: int, store: Any, *, board: Board, deadline_s: float, start_s: float = 120.0, backend: str = "gloo"
) -> TorchComm:
    """Join ``size`` ranks that share ``store`` (a torch.distributed store) and return this rank's Comm.

    deadline_s: seconds one call may wait; start_s: seconds for all ranks to appear. Raises RankError naming the ranks that did
    not. One rank needs no transport and opens no socket.
    """
    comm = TorchComm(rank, size, deadline_s=start_s, board=board)
    comm.enter("connect")
    if size > 1:
        begun = time.monotonic()
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=start_s))
        except RuntimeError as error:
            if time.monotonic() - begun >= start_s:
                raise late(board, "connect", start_s, waiter=rank, peer=0) from error
            lost = f"could not join {size} ranks over {backend}: {_first_line(error)}"
            raise RankError(lost, rank=rank, phase="connect", secondary=True) from error
        if rank == 0:
            store.set("token", secrets.token_hex(32))
        comm.greet(store.get("token"))
        comm.barrier("connected")  # nobody starts until every connection is proved
    comm.deadline_s = deadline_s
    comm.enter("connected")
    return comm
