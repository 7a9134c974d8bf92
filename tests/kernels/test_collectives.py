"""Collectives: nobody passes the barrier early, ranks make the same calls, and the in-process transport carries them."""

import threading
import time
from importlib import import_module

import pytest
from bare_ranks import make_call, on_ranks
from test_ops import compare, copied, play

from palimpsest.kernels.table import contract, implementation
from palimpsest.ranks.local import LocalWorld

COLLECTIVES = ("gather_history", "exchange_ids", "barrier", "reduce_output")
CASES = [(op, case) for op in COLLECTIVES for case in import_module(f"palimpsest.kernels.{op}.cases").cases()]


def test_collective_contracts_say_so():
    assert all(contract(op).collective for op in COLLECTIVES)


@pytest.mark.parametrize("engine", ["portable", "reference"])
def test_nobody_passes_the_barrier_before_the_last(engine):
    (case,) = [c for op, c in CASES if op == "barrier" and c.ranks == 4 and "at 0" in c.name]
    arrived, lock = [], threading.Lock()

    def body(comm):
        if comm.rank == 2:
            time.sleep(0.2)
        with lock:
            arrived.append(comm.rank)
        implementation("barrier", engine)(make_call("barrier", case.params, copied(case.planes[comm.rank]), comm), case.chunk)
        return len(arrived)

    assert on_ranks(4, body) == [4] * 4


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}: {case.name}" for op, case in CASES])
def test_over_in_process_ranks(op, case):
    """Any interleaving of the seeded scheduler gives the reference's bytes; a mismatched call would end as a RankError."""
    expected = play(op, case, "reference")
    for seed in (0, 1):

        def body(comm):
            planes = copied(case.planes[comm.rank])
            implementation(op, "portable")(make_call(op, case.params, planes, comm), case.chunk)
            return planes

        compare(op, case, LocalWorld(case.ranks, seed=seed).run(body), expected)
