"""What ranks do in the tests: targets ``f(comm, config, emit)`` that run in-process and in real processes alike."""

import os
import signal
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from palimpsest.core.errors import BadCheckpoint

DTYPES = (torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)


def _others(comm):
    return [peer for peer in range(comm.size) if peer != comm.rank]


def everything_legal(comm, config, emit):
    """Every dtype, many messages at once, ragged and empty messages, partial peers; returns what was wrong (nothing)."""
    wrong = []
    comm.enter("all to all")
    for dtype in DTYPES:
        mine = torch.full((comm.size, 37), comm.rank, dtype=torch.float32).to(dtype)
        theirs = torch.empty(comm.size, 37, dtype=dtype)
        comm.exchange([(p, mine[p]) for p in _others(comm)], [(p, theirs[p]) for p in _others(comm)], f"all {dtype}")
        wrong += [f"{dtype} from {p}" for p in _others(comm) if not bool((theirs[p].float() == p).all())]
    comm.enter("ragged")
    # rank r sends r rows to everybody: rank 0 sends nothing and the empty views are skipped on both sides
    mine, theirs = (
        torch.full((comm.rank, 3), comm.rank, dtype=torch.int32),
        torch.full((comm.size, comm.size, 3), -1, dtype=torch.int32),
    )
    comm.exchange([(p, mine) for p in _others(comm)], [(p, theirs[p, :p]) for p in _others(comm)], "ragged")
    wrong += [f"ragged from {p}" for p in _others(comm) if theirs[p].tolist() != [[p] * 3] * p + [[-1] * 3] * (comm.size - p)]
    comm.enter("order")
    first, second = torch.tensor([1.0]), torch.tensor([2.0, 3.0])
    got = torch.empty(3)
    if comm.rank == 0:
        for peer in _others(comm):
            comm.exchange([(peer, first), (peer, second)], [], "order")
    else:
        comm.exchange([], [(0, got[:1]), (0, got[1:])], "order")
        wrong += [] if got.tolist() == [1.0, 2.0, 3.0] else [f"order {got.tolist()}"]
    comm.exchange([], [], "nothing")
    for turn in range(5):
        comm.barrier(f"turn {turn}")
    comm.agree("revision", "same everywhere")
    comm.agree("long", "x" * 5000)
    emit({"rank": comm.rank, "done": True})
    print(f"output of {comm.rank}")
    return {"wrong": wrong, "pid": os.getpid(), "threads": torch.get_num_threads()}


def barrier_holds(comm, config, emit):
    """After the barrier every rank has passed the point before it."""
    if comm.rank == comm.size - 1:
        time.sleep(config.get("sleep", 0.0))
    before = time.monotonic_ns()
    comm.barrier("all here")
    return {"before": before, "after": time.monotonic_ns()}


def wrong_label(comm, config, emit):
    comm.enter("p5")
    view = torch.zeros(8, dtype=torch.uint8)
    if comm.rank == 0:
        comm.exchange([(1, view)], [], "ids")
    elif comm.rank == 1:
        comm.exchange([], [(0, view)], "keys")
    comm.barrier("after")


def wrong_size(comm, config, emit):
    comm.enter("p5")
    if comm.rank == 0:
        comm.exchange([(1, torch.zeros(config["sent"], dtype=torch.uint8))], [], "ids")
    elif comm.rank == 1:
        comm.exchange([], [(0, torch.zeros(config["expected"], dtype=torch.uint8))], "ids")
    comm.barrier("after")


def wrong_call(comm, config, emit):
    comm.enter("p5")
    if comm.rank == 0:
        comm.barrier("first")
    else:
        comm.agree("second", "text")


def disagree(comm, config, emit):
    comm.enter("case 1")
    comm.agree("revision", "same")
    comm.agree("plan digest", config["texts"][comm.rank])


def fail(comm, config, emit):
    """One rank fails in phase p6 while the others wait."""
    comm.enter("p5")
    comm.barrier("selection")
    comm.enter("p6")
    emit({"pid": os.getpid(), "rank": comm.rank})
    if comm.rank == config["rank"]:
        how = config["how"]
        if how == "raise":
            raise ValueError("no such page")
        if how == "user":
            raise BadCheckpoint("shard 3 is short")
        if how == "exit":
            os._exit(0)
        if how == "sleep":
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, how))
    comm.barrier("latent")


def idle(comm, config, emit):
    """Starts a process of its own, says which, and stays."""
    comm.enter("idle")
    helper = os.fork()
    if helper == 0:
        signal.pause()
    comm.barrier("ready")
    emit({"pid": os.getpid(), "helper": helper})
    time.sleep(600)


def wait_for_file(comm, config, emit):
    """Keeps exchanging until the test says stop."""
    comm.enter("busy")
    emit({"pid": os.getpid()})
    view, theirs = torch.full((4,), comm.rank), torch.empty(4, dtype=torch.int64)
    turns = 0
    while True:
        stop = torch.tensor([int(os.path.exists(config["stop"]))])
        if comm.rank == 0:
            comm.exchange([(p, stop) for p in _others(comm)], [], "stop")
        else:
            comm.exchange([], [(0, stop)], "stop")
        peer = comm.rank ^ 1
        comm.exchange([(peer, view)], [(peer, theirs)], "pair")
        assert theirs.tolist() == [peer] * 4
        turns += 1
        if int(stop[0]):
            return turns
        time.sleep(0.01)


def idle_once(comm, config, emit):
    """Says its process id and waits for the test to have looked."""
    emit({"pid": os.getpid()})
    while not os.path.exists(config["stop"]):
        time.sleep(0.01)


class _Calls(TorchDispatchMode):
    """Names of the operators torch ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def watched(comm, config, emit):
    """The operators that the protocol's calls run."""
    mine, theirs = torch.zeros(comm.size, 3, dtype=torch.bfloat16), torch.zeros(comm.size, 3, dtype=torch.bfloat16)
    sends, receives = [(p, mine[p]) for p in _others(comm)], [(p, theirs[p]) for p in _others(comm)]
    with _Calls() as calls:
        comm.enter("watched")
        comm.exchange(sends, receives, "ids")
        comm.barrier("b")
        comm.agree("a", "text")
    return sorted(calls.names)


def forged(comm, config, emit):
    """Rank 1 was taken over by a process that does not know the token."""
    comm.enter("connect")
    comm.greet(b"guess" if comm.rank == 1 else b"secret")
