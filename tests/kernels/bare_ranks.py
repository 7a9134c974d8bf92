"""Binds ops and whole layer programs to plain buffers and runs them on a few in-process ranks: no plan, no arena, no
processes.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from palimpsest.core.spec import Program
from palimpsest.kernels.call import TORCH_DTYPES, Call, Chunk, Scratch, no_tap
from palimpsest.kernels.table import contract, implementation

DEADLINE = 60.0


class Wires:
    """What the ranks of one run share: one queue per ordered pair and a barrier."""

    def __init__(self, size: int):
        self.size = size
        self.queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
        self.gate = threading.Barrier(size)


class WireComm:
    """A minimal Comm: copies travel through queues, so that a late reader cannot see a sender's next bytes."""

    def __init__(self, wires: Wires, rank: int):
        self.wires, self.rank, self.size = wires, rank, wires.size
        self.labels: list[str] = []

    def exchange(self, sends, receives, label):
        self.labels.append(label)
        for peer, tensor in sends:
            assert peer != self.rank
            assert tensor.is_contiguous()
            self.wires.queues[self.rank, peer].put(tensor.clone())
        for peer, tensor in receives:
            assert tensor.is_contiguous()
            found = self.wires.queues[peer, self.rank].get(timeout=DEADLINE)
            assert found.shape == tensor.shape, f"{label}: {tuple(found.shape)} sent, {tuple(tensor.shape)} expected"
            tensor.copy_(found)

    def barrier(self, label):
        self.labels.append(label)
        self.wires.gate.wait(DEADLINE)

    def agree(self, label, text):
        self.labels.append(label)

    def enter(self, phase):
        pass


def on_ranks(size: int, body: Callable[[WireComm], object]) -> list[object]:
    """``body(comm)`` on every rank in its own thread; results in rank order; the first exception is raised here."""
    wires = Wires(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(body, WireComm(wires, rank)) for rank in range(size)]
        for future in as_completed(futures):
            if future.exception():
                wires.gate.abort()
    errors = [e for future in futures if (e := future.exception())]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError | queue.Empty)), errors[0])
    return [future.result() for future in futures]


def aligned(nbytes: int, fill: int = 0) -> torch.Tensor:
    """``nbytes`` of u8, 64-byte aligned like a planned buffer, every byte ``fill``."""
    raw = torch.full((nbytes + 64,), fill, dtype=torch.uint8)
    at = -raw.data_ptr() % 64
    return raw[at : at + nbytes]


def make_call(
    op: str, params: Mapping, planes: Mapping[str, Mapping[str, torch.Tensor]], comm, tap=no_tap, scratch_fill=0x7F
) -> Call:
    """A Call over the given full-capacity planes with scratch of exactly the contract's size, filled with ``scratch_fill``."""
    scratch = Scratch(aligned(contract(op).scratch(**params), scratch_fill))
    return Call(name=op, params=params, views=planes, raws={}, scratch=scratch, comm=comm, tap=tap)


class Rank:
    """One rank's buffers and calls of a whole program, unplanned: every buffer has bytes of its own."""

    def __init__(self, program: Program, comm, engine: str, *, fill: int = 0, tap=no_tap):
        self.program, self.comm, self.engine = program, comm, engine
        self.raw = {b.name: aligned(b.nbytes, fill if b.kind in ("reusable", "staging") else 0) for b in program.all_buffers}
        self.planes = {}
        for b in program.all_buffers:
            views = {}
            for plane in b.planes:
                at = b.plane_offset(plane.name)
                views[plane.name] = self.raw[b.name][at : at + plane.nbytes].view(TORCH_DTYPES[plane.dtype]).view(plane.shape)
            self.planes[b.name] = views
        self.steps = []
        for step in program.steps:
            roles = {role: self.planes[name] for role, name in (*step.reads, *step.writes, *step.updates)}
            scratch = Scratch(self.raw[step.scratch_name] if step.scratch else torch.empty(0, dtype=torch.uint8))
            call = Call(step.name, dict(step.params), roles, {}, scratch, comm, tap)
            self.steps.append((implementation(step.op, engine), call))

    def view(self, name: str, plane: str | None = None) -> torch.Tensor:
        return self.planes[name][plane or next(iter(self.planes[name]))]

    def poison(self, byte: int) -> None:
        """Every byte of every reusable and staging buffer."""
        for b in self.program.all_buffers:
            if b.kind in ("reusable", "staging") and b.name not in self.program.inputs:
                self.raw[b.name].fill_(byte)

    def run(self, chunk: Chunk) -> torch.Tensor:
        for function, call in self.steps:
            function(call, chunk)
        return self.view("output")[: chunk.rows].clone()
