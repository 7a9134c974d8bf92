"""Each guard is shown to fail on a planted fault, and to stay silent without one."""

import numpy as np
import pytest
import torch

from palimpsest.core.errors import HiddenAllocation, RankError
from palimpsest.kernels.call import Chunk
from palimpsest.plan.place import place
from palimpsest.run.arena import Arena
from palimpsest.run.guards import Canary, SealGuard, SlackCanaries, WriteWatcher, declared_writes


@pytest.fixture
def arena(toy):
    program = toy.program()
    made = Arena(program, place(program))
    yield made
    made.close()


@pytest.mark.parametrize(
    "allocate",
    [
        lambda x: torch.empty(4),
        torch.zeros_like,
        lambda x: x + 1,
        lambda x: x.clone(),
        lambda x: x.to(torch.float64),
        lambda x: x.t().contiguous(),
        lambda x: x.sum(),
        torch.sort,
        lambda x: x[x > 0],
        lambda x: torch.mm(x, x.t()),
    ],
)
def test_seal_guard_names_the_allocating_operation(arena, allocate) -> None:
    x = arena.view("hidden")
    with pytest.raises(HiddenAllocation, match="outside the plan after the seal"), SealGuard(arena):
        allocate(x)


def test_seal_guard_allows_views_in_place_and_out(arena) -> None:
    x, y, caller = arena.view("hidden"), arena.view("output"), torch.ones(16, 8)
    guard = SealGuard(arena)
    with guard:
        x.copy_(caller)
        x[:3].view(-1)[2:5].mul_(2.0).add_(1.0)
        torch.mul(x, x, out=y)
        caller[:2].t()
        x[:0].clone()
        int(arena.view("ids")[0, 0])
    assert guard.operations >= 8
    with guard:  # may be entered again
        x.zero_()


def splitmix64(seed: int, index: int) -> int:
    """The published generator, in plain integers."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (3, 29), (131072 - 5, 131072 * 2 + 11), (8, 8), (40960, 300001)])
def test_canary_is_the_address_pattern(start: int, stop: int) -> None:
    memory = torch.zeros(300001, dtype=torch.uint8)
    canary = Canary(seed=2**63 + 12345)
    assert canary.fill(memory, start, stop) == stop - start
    assert canary.first_bad(memory, start, stop) is None
    assert not memory[:start].any()
    assert not memory[stop:].any()
    for at in {start, (start + stop) // 2, stop - 1} - {start - 1, stop}:
        word = splitmix64(2**63 + 12345, at // 8).to_bytes(8, "little")
        assert int(memory[at]) == word[at % 8]
        memory[at] ^= 1
        assert canary.first_bad(memory, start, stop) == at
        memory[at] ^= 1


def test_a_misplaced_copy_of_the_canary_is_still_wrong() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    canary = Canary(1)
    canary.fill(memory, 0, 4096)
    memory[1024:2048] = memory[0:1024].clone()
    assert canary.first_bad(memory, 0, 4096) == 1024


def test_slack_canaries(arena) -> None:
    canaries = SlackCanaries(arena, seed=3)
    assert canaries.nbytes == arena.mapped_bytes - sum(
        len(set().union(*(range(p.offset, p.stop) for p in arena.plan.places if p.kind == kind))) for kind in arena.segments
    )
    for buffer in arena.program.all_buffers:
        arena.raw(buffer.name).fill_(0xAA)
    assert canaries.damage() == []
    start, _ = arena.slack("table")[-1]
    arena.segment("table")[start + 5] ^= 1
    (line,) = canaries.damage()
    assert f"byte {start + 5}" in line
    assert "table" in line


def test_declared_writes_follow_the_active_sizes(arena) -> None:
    steps = {s.name: s for s in arena.program.steps}
    chunk = Chunk(history=100, rows=5)
    at = arena.plan.by_name["index_history"].offset
    assert declared_writes(arena, steps["index"], 0, chunk) == [
        ("reusable", at, at + 105 * 128), ("reusable", at + 1024 * 128, at + 1024 * 128 + 105 * 4),
    ]  # fmt: skip
    page = 64 * 576
    assert declared_writes(arena, steps["append"], 0, chunk) == [("persistent", page, 2 * page)]
    both = [("persistent", page, 2 * page), ("persistent", 2 * page, 3 * page)]
    assert declared_writes(arena, steps["append"], 0, Chunk(126, 4)) == both
    assert declared_writes(arena, steps["append"], 0, Chunk(126, 0)) == []


def watched(toy, *, ops=None, exact=True, reuse="on"):
    def main(session):
        watcher = WriteWatcher(session.arena, exact=exact)
        session.prefill(torch.randn(5, toy.WIDTH), 70, hooks=watcher)
        return watcher

    return toy.run(main, ops=ops, reuse=reuse)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("reuse", ["on", "off"])
def test_watcher_is_silent_on_an_honest_run(toy, exact: bool, reuse: str) -> None:
    watcher = watched(toy, exact=exact, reuse=reuse)
    assert watcher.violations == []
    assert watcher.checked > 5 * watcher.arena.plan.total


@pytest.mark.parametrize("exact", [True, False])
def test_watcher_finds_a_write_to_a_buffer_that_is_only_read(toy, exact: bool) -> None:
    def attend(call, chunk):
        toy.toy_attend(call, chunk)
        call.view("history").view(-1)[5000] ^= 1

    (violation,) = watched(toy, ops={"toy_attend": attend}, exact=exact).violations
    assert violation.step == "attend"
    assert "latent_history (read)" in str(violation)
    assert (violation.offset == 5000) is exact
    assert 0 <= 5000 - violation.offset < 65536


def test_watcher_finds_a_write_beyond_the_visible_tokens(toy) -> None:
    def latent(call, chunk):
        toy.toy_latent(call, chunk)
        call.view("history")[min(chunk.visible, 1023), 0] = 9

    (violation,) = watched(toy, ops={"toy_latent": latent}).violations
    assert (violation.step, violation.offset) == ("latent", 75 * 576)


def test_watcher_finds_a_write_through_a_smuggled_view(toy) -> None:
    """The step declares ``output`` and writes the cache through a view it kept."""
    kept = {}

    def append(call, chunk):
        toy.toy_append(call, chunk)
        kept["cache"] = call.view("cache")

    def attend(call, chunk):
        toy.toy_attend(call, chunk)
        kept["cache"][0, 3] ^= 0xFF

    (violation,) = watched(toy, ops={"toy_append": append, "toy_attend": attend}).violations
    assert violation.segment == "persistent"
    assert "latent_cache (undeclared)" in str(violation)
    kept.clear()


def test_session_guard_catches_a_hidden_allocation_in_a_kernel(toy) -> None:
    def attend(call, chunk):
        call.view("output")[: chunk.rows].copy_(call.view("hidden")[: chunk.rows] + 1.0)

    def main(session):
        session.prefill(torch.zeros(2, toy.WIDTH), 0)  # unguarded: passes
        session.prefill(torch.zeros(2, toy.WIDTH), 0, guard=True)

    with pytest.raises(RankError, match="outside the plan after the seal") as caught:
        toy.run(main, ops={"toy_attend": attend})
    assert "p7" in str(caught.value)


def test_session_guard_does_not_guard_the_hooks(toy) -> None:
    class Copying:
        seen = ()

        def before(self, step, call, chunk):
            torch.zeros(3)

        after = before

        def tap(self, step, event, **data):
            self.seen = (step.name, event, data["output"].clone())

    def main(session):
        hooks = Copying()
        session.prefill(torch.ones(2, toy.WIDTH), 0, hooks=hooks, guard=True)
        return hooks.seen

    name, event, output = toy.run(main)
    assert (name, event) == ("attend", "attended")
    assert np.array_equal(output.numpy(), np.tile(np.arange(1.0, 9.0) + 1, (2, 1)))
