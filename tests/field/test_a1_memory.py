"""Field cases A1: score tiles, workspaces and gathered histories that outgrow what was planned, or grow after the seal."""

import itertools
import tracemalloc
from types import SimpleNamespace

import pytest
import torch

from palimpsest.core.errors import HiddenAllocation, PlanRefused, RankError, Unavailable, UnknownName
from palimpsest.core.spec import Limits
from palimpsest.core.units import parse_bytes
from palimpsest.kernels.index_select.cases import cases as select_cases
from palimpsest.kernels.index_select.reference import run as reference_select
from palimpsest.kernels.sizes import FILTER_BLOCK, FILTER_KEYS, KEY_TILE, STAGING_BYTES
from palimpsest.plan.account import account
from palimpsest.plan.check import check
from palimpsest.plan.place import place
from palimpsest.recipes import default_formats, load_geometry
from palimpsest.recipes import program as recipe_program
from palimpsest.run import arena as arenas
from palimpsest.run.bind import default_implementations
from palimpsest.run.meters import arena_pss, changes, counters, meter


def scratch_of(program) -> dict[str, int]:
    return {step.name: step.scratch for step in program.steps}


@pytest.mark.parametrize("model", ["kimi-k3.1-pro", "deepseek-v3.2", "glm-5.2"])
def test_1_01_score_tile_is_a_planned_slot_whatever_the_context(model: str) -> None:
    """No step's workspace has a factor of context: the score tile of a 1M prefill has the bytes of a 64K one."""
    geometry = load_geometry(model)
    layer, formats = geometry.full_layers[0], default_formats(geometry)
    short, long = (recipe_program(geometry, Limits(tokens, 4096, 8), formats, layer) for tokens in (1 << 16, 1 << 20))
    assert scratch_of(short) == scratch_of(long)
    assert {b.name for b in long.all_buffers if b.name.startswith("scratch:")} or all(
        s.scratch_name in long.by_name for s in long.steps if s.scratch
    )


def test_1_01_bytes_do_not_depend_on_the_live_history(m0) -> None:
    def main(session):
        rows, found = m0.hidden(16), []
        for history in (0, 16, 48):
            with meter(session.arena, torch_memory=True) as reading:
                session.prefill(rows, history)
            found.append((reading.torch_total, arena_pss(session.arena)))
        return found

    (found,) = m0.run(main)
    assert [total for total, _ in found] == [0, 0, 0]
    assert found[0][1] == found[1][1] == found[2][1]


def test_1_02_no_temporary_outside_the_plan_in_any_step(m0) -> None:
    """Every torch operation of every step, masks and casts included, writes into planned bytes."""

    def main(session):
        session.prefill(m0.hidden(16), 48, guard=True)
        return session.guard.operations

    assert m0.run(main)[0] > 100


def test_1_02_a_planted_temporary_is_found(m0) -> None:
    def masks(run, call, chunk):
        run(call, chunk)
        if chunk.rows == 3:
            torch.cat([call.view("ids") >= 0, call.view("ids") >= 0])

    def main(session):
        session.prefill(m0.hidden(3), 0, guard=True)

    with pytest.raises(RankError, match="cat") as caught:
        m0.run(main, more=m0.altered(m0.program(), "exchange_ids", masks))
    assert isinstance(caught.value.__cause__, HiddenAllocation)


def test_1_04_a_head_costs_its_tile_and_not_a_copy_of_the_keys(m0) -> None:
    """One head more adds the same bytes to the select step at 64 tokens and at 64K tokens."""
    cost = {}
    for tokens in (64, 1 << 16):
        one, two = (m0.program(m0.geometry(index_heads=h), tokens=tokens) for h in (1, 2))
        cost[tokens] = scratch_of(two)["index_select"] - scratch_of(one)["index_select"]
    assert cost[64] == cost[1 << 16] > 0


def test_1_04_the_reference_is_bounded_too() -> None:
    """The slow path scores row by row and head by head: its peak is a few rows of scores, not rows x heads x context."""
    case = next(c for c in select_cases() if c.name == "16 rows at 48, fp8")
    tokens = 96
    for planes, rank in zip(case.planes, range(2), strict=True):
        call = SimpleNamespace(
            params=case.params, comm=SimpleNamespace(rank=rank, size=2), tap=lambda event, **data: None,
            view=lambda role, plane=None, planes=planes: planes[role][plane or next(iter(planes[role]))],
        )  # fmt: skip
        reference_select(call, case.chunk)
        tracemalloc.start()
        reference_select(call, case.chunk)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        every_score_of_every_head = 16 * 2 * tokens * 8
        assert peak < every_score_of_every_head, (peak, every_score_of_every_head)


def test_1_07_width_is_constant_and_nothing_is_allocated_after_warm_up(m0) -> None:
    def main(session):
        shapes = {b.name: tuple(session.arena.view(b.name, b.planes[0].name).shape) for b in session.program.buffers}
        for history, rows in ((0, 1), (48, 16), (7, 3), (0, 16), (64, 0)):
            session.prefill(m0.hidden(16)[:rows], history, guard=True)
            assert shapes == {b.name: tuple(session.arena.view(b.name, b.planes[0].name).shape) for b in session.program.buffers}
        return changes(session.at_seal, counters(session.arena))

    assert m0.run(main) == [[]]


def test_1_08_the_plan_does_not_lean_on_free_memory(m0, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for free in (1 << 20, 1 << 50):
        monkeypatch.setattr(arenas, "available_bytes", lambda free=free: free)
        digests.add(place(m0.program()).digest)
    assert len(digests) == 1


def test_1_10_sizes_follow_their_own_unit(m0) -> None:
    """Twice the tokens doubles exactly what counts tokens or pages; twice the rows exactly what counts rows or slices."""
    base, longer, taller = m0.program(), m0.program(tokens=128), m0.program(rows=32)
    for buffer in base.buffers:
        for plane in buffer.planes:
            units = set(plane.axes)
            long, tall = (next(p for p in m.by_name[buffer.name].planes if p.name == plane.name).nbytes for m in (longer, taller))
            if buffer.name != "staging":
                assert long == plane.nbytes * (2 if units & {"tokens", "pages"} else 1), (buffer.name, plane)
                assert tall == plane.nbytes * (2 if units & {"rows", "slice"} else 1), (buffer.name, plane)


def test_1_11_a_buffer_below_the_peak_is_worth_nothing(m0) -> None:
    """The bill names the step that binds; what does not live there saves nothing, and it says so."""
    made = m0.program()
    bill = account(made, place(made))
    idle = [slot for slot in bill.slots if slot.kind == "reusable" and not slot.at_peak]
    assert bill.peak_step in {step.name for step in made.steps}
    assert idle
    assert all(slot.worth == 0 and slot.why for slot in idle)


def test_1_13_too_little_memory_names_the_slot_both_numbers_and_the_next_step(m0, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "available_bytes", lambda: parse_bytes("1K"))
    with pytest.raises(Unavailable) as caught:
        arenas.Arena(m0.program(), place(m0.program()))
    text = str(caught.value)
    assert "m0/layer0" in text
    assert "wanted" in text
    assert "1 KiB available" in text
    assert "prepare less" in text
    assert all(buffer.formula for buffer in m0.program().buffers)


@pytest.mark.parametrize("warm", [0, 3, 48])
def test_1_14_the_workspace_is_the_plans_and_not_the_warm_ups(m0, warm: int) -> None:
    """1.14 and 1.16: a seal after a small warm-up still serves the largest prefill, without growing."""

    def main(session):
        before = arena_pss(session.arena)
        session.prefill(m0.hidden(16), 48, guard=True)
        return before == arena_pss(session.arena), changes(session.at_seal, counters(session.arena))

    assert m0.run(main, more={"warm_history": warm}) == [(True, [])]


def test_1_17_every_step_ran_before_the_seal(m0) -> None:
    """A plan cannot be sealed with a phase that never ran, nor with a step nobody implements."""
    made, ran = m0.program(), []
    known = default_implementations(made, "portable")

    def counted(op):
        def run(call, chunk):
            ran.append(call.name)
            known[op](call, chunk)

        return run

    m0.run(lambda session: None, more={"implementations": {op: counted(op) for op in known}})
    assert set(ran) == {step.name for step in made.steps}
    with pytest.raises(RankError) as caught:
        m0.run(lambda session: None, more={"implementations": {op: known[op] for op in known if op != "gather_history"}})
    assert isinstance(caught.value.__cause__, UnknownName)


def test_1_19_the_dummy_replay_has_no_side_effects(m0) -> None:
    """The warm replays leave caches and signals at zero, and a chunk without rows changes no cache byte."""

    def main(session):
        clean = not session.arena.segment("persistent").any() and not session.arena.segment("signal").any()
        m0.whole(session)
        before = session.arena.segment("persistent").clone()
        session.prefill(m0.hidden(0), 64)
        return clean, m0.same(before, session.arena.segment("persistent"))

    assert m0.run(main, ranks=2) == [(True, True)] * 2


def test_1_20_an_allocation_on_one_rank_ends_the_run_by_name(m0) -> None:
    def late(run, call, chunk):
        run(call, chunk)
        if call.comm.rank == 1 and chunk.rows == 5:
            call.view("output").clone()

    def main(session):
        session.prefill(m0.hidden(5), 0, guard=True)

    with pytest.raises(RankError, match="clone") as caught:
        m0.run(main, ranks=2, more=m0.altered(m0.program(ranks=2), "reduce_output", late))
    assert (caught.value.rank, caught.value.phase) == (1, "p8")


@pytest.mark.parametrize("reuse", ["on", "off"])
def test_1_22_reusable_bytes_grow_by_the_records_alone(m0, reuse: str) -> None:
    """1.22 and 1.23: per token exactly one latent record (20 B), and with reuse off one index record (12 B) more."""
    peaks = [place(m0.program(tokens=tokens), reuse).peak for tokens in (1 << 18, 1 << 19, 1 << 20)]
    slope = 20 if reuse == "on" else 32
    assert [b - a for a, b in itertools.pairwise(peaks)] == [slope << 18, slope << 19]


def test_1_25_a_gather_moves_the_visible_pages_of_one_layer(m0) -> None:
    """Bytes on the wire of both gathers: what is visible, in whole pages, of this layer's cache and no other."""
    sent = {"gather_index": 0, "gather_latent": 0}

    def count(run, call, chunk):
        class Counting:
            rank, size = call.comm.rank, call.comm.size

            def exchange(self, sends, receives, label):
                sent[label] += sum(t.numel() * t.element_size() for _, t in sends)
                inner.exchange(sends, receives, label)

        inner = call.comm
        call.comm = Counting()
        run(call, chunk)
        call.comm = inner

    def main(session):
        sent.update(dict.fromkeys(sent, 0))
        session.comm.barrier("counting")
        session.prefill(m0.hidden(6), 15)

    m0.run(main, ranks=2, more=m0.altered(m0.program(ranks=2), "gather_history", count))
    pages = 6  # 21 visible tokens in pages of 4, each sent once to the only peer
    assert sent == {"gather_index": pages * 4 * 12, "gather_latent": pages * 4 * 20}


def test_1_28_one_function_sizes_a_workspace(m0) -> None:
    """The step's own scratch is what its contract planned: an implementation that needs more stops, and none wastes it all."""
    used: dict[str, int] = {}

    def main(session):
        watch = m0.Watch(
            after={"*": lambda step, call, chunk: used.update({step.name: max(used.get(step.name, 0), call.scratch.used)})}
        )
        m0.whole(session, hooks=watch)

    m0.run(main)
    for step in m0.program().steps:
        assert used[step.name] <= step.scratch
        assert (used[step.name] > 0) == (step.scratch > 0), step.name


def test_1_29_the_addressing_limit_is_part_of_the_budget() -> None:
    """A plan whose offsets pass a kernel's index type is refused while planning, in the name of the buffer."""
    geometry = load_geometry("kimi-k3.1-pro")
    made = recipe_program(
        geometry, Limits(1 << 20, 4096, 8), default_formats(geometry).replace(latent="fp32"), geometry.full_layers[0]
    )
    plan = place(made)
    check(made, plan)
    with pytest.raises(PlanRefused, match="32-bit kernel offset"):
        check(made, plan, index_bits=32)


def test_1_31_peak_live_over_four_key_tiles(m0) -> None:
    """A loop that holds tile i while it makes tile i+1 needs two tiles: over four tiles nothing is live but the planned one."""
    tokens, scores = 4 * KEY_TILE, m0.Scores()

    def main(session):
        rows = m0.hidden(16)
        session.prefill(rows, tokens - 16)
        with meter(session.arena, torch_memory=True) as reading:
            session.prefill(rows, tokens - 16)
        tracemalloc.start()
        session.prefill(rows, tokens - 16)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        scores.history = tokens - 16
        session.prefill(rows, tokens - 16, hooks=scores.hooks)
        return reading.torch_total, peak

    ((torch_total, peak),) = m0.run(main, tokens=tokens, page=64)
    assert set(scores.tiles.values()) == {4}
    assert torch_total == 0
    assert peak < FILTER_BLOCK * FILTER_KEYS * 4, "numpy or Python held a whole tile of fp32 scores beside the planned one"


def test_1_32_query_rows_are_cut_into_groups_of_bounded_size(m0) -> None:
    """16 rows and 4,096 rows need the same selection workspace."""
    few, many = m0.program(tokens=1 << 13), m0.program(tokens=1 << 13, rows=4096)
    assert scratch_of(few)["index_select"] == scratch_of(many)["index_select"]
    assert many.by_name["staging"].nbytes <= STAGING_BYTES
