"""The seeded scheduler: a seed is an interleaving, a deadlock is found and named, no thread is left."""

import random
import threading

import pytest
import torch

from palimpsest.core.errors import BadCheckpoint, RankError
from palimpsest.ranks.comm import Comm
from palimpsest.ranks.local import LocalWorld, run_local


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def _ring(comm: Comm) -> int:
    mine, theirs = torch.tensor([comm.rank]), torch.empty(1, dtype=torch.int64)
    for turn in range(3):
        comm.enter(f"turn {turn}")
        comm.exchange([((comm.rank + 1) % comm.size, mine)], [((comm.rank - 1) % comm.size, theirs)], f"ring {turn}")
        mine.copy_(theirs)
        comm.barrier(f"turned {turn}")
    return int(mine[0])


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_is_an_interleaving(seed: int) -> None:
    traces = []
    for _ in range(2):
        world = LocalWorld[int](5, seed=seed)
        assert world.run(_ring) == [(rank - 3) % 5 for rank in range(5)]
        traces.append(world.trace)
    assert traces[0] == traces[1]


def test_seeds_differ_and_global_randomness_is_not_used() -> None:
    traces = []
    for seed in range(4):
        random.seed(0)
        world = LocalWorld[int](4, seed=seed)
        world.run(_ring)
        traces.append(tuple(world.trace))
    assert len(set(traces)) == 4


def test_only_one_rank_runs_at_a_time() -> None:
    inside = [0]

    def main(comm: Comm) -> None:
        for turn in range(20):
            inside[0] += 1
            assert inside[0] == 1
            inside[0] -= 1
            comm.enter(str(turn))

    run_local(8, main)


def test_a_held_rank_arrives_last() -> None:
    def hold(rank: int, call: str, label: str) -> int:
        return 1000 if (rank, call, label) == (1, "enter", "late") else 0

    for seed in range(5):
        order: list[int] = []

        def main(comm: Comm, order: list[int] = order) -> None:
            comm.enter("late")
            order.append(comm.rank)

        run_local(4, main, seed=seed, hooks=hold)
        assert order[-1] == 1
        assert len(order) == 4


def test_a_hook_can_inject_a_fault_at_the_nth_call() -> None:
    for n in range(3):
        calls = iter(range(1000))

        def fail(rank: int, call: str, label: str, calls=calls, n: int = n) -> int:
            if call == "exchange" and next(calls) == n:
                raise OSError("injected")
            return 0

        with pytest.raises(RankError, match="OSError: injected"):
            run_local(3, _ring, hooks=fail)


def test_a_deadlock_names_every_rank_and_its_label() -> None:
    def main(comm: Comm) -> None:
        comm.enter("p5")
        if comm.rank == 0:
            comm.barrier("never")
        elif comm.rank == 1:
            comm.exchange([], [(2, torch.empty(1))], "ids")

    with pytest.raises(RankError, match="deadlock") as caught:
        run_local(3, main)
    assert (caught.value.rank, caught.value.phase) == (0, "p5")
    for text in ("rank 0 waits in barrier 'never'", "rank 1 waits in exchange 'ids' with rank 2", "rank 2 ended"):
        assert text in str(caught.value)


def test_the_cause_of_a_failure_is_kept_and_user_errors_keep_their_exit_code() -> None:
    def main(comm: Comm) -> None:
        comm.enter("load")
        comm.barrier("all")
        if comm.rank == 2:
            raise BadCheckpoint("shard 3 is short")
        comm.barrier("never")

    with pytest.raises(RankError, match="rank 2 in load: BadCheckpoint: shard 3 is short") as caught:
        run_local(4, main)
    assert isinstance(caught.value.__cause__, BadCheckpoint)
    assert caught.value.exit_code == 2
