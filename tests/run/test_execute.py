"""A prepared session end to end: the same bits whatever ranks, chunks, arrangement and leftovers; refusals that touch no byte."""

import hashlib

import pytest
import torch

from palimpsest.core.errors import BadConfig, CapacityError, PlanRefused, RankError, UnknownName, UserError
from palimpsest.core.geometry import Formats
from palimpsest.core.spec import Limits
from palimpsest.plan.place import place
from palimpsest.ranks.local import run_local
from palimpsest.recipes.blocks import layer_program
from palimpsest.run.arena import PAGE
from palimpsest.run.execute import prepare
from palimpsest.run.guards import SlackCanaries, WriteWatcher
from palimpsest.run.meters import arena_pss, changes, counters, mappings, meter
from palimpsest.run.poison import PATTERNS, poison
from palimpsest.run.weights import synthetic

FORMATS = {
    "fp8": Formats(activation="bf16"),
    "fp32": Formats(index="fp32", latent="fp32", activation="fp32", weights="fp32"),
    "bf16": Formats(latent="bf16", activation="bf16"),
}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def digest(session) -> str:
    """Every byte of every segment."""
    found = hashlib.sha256()
    for kind in session.arena.segments:
        found.update(session.arena.segment(kind).numpy())
    return found.hexdigest()


@pytest.fixture(scope="module")
def expected(micro):
    return {name: micro.run(micro.whole, formats=formats)[0] for name, formats in FORMATS.items()}


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_same_bits_on_every_rank_count(micro, expected, formats: str, ranks: int) -> None:
    for output in micro.run(micro.whole, formats=FORMATS[formats], ranks=ranks):
        assert same(output, expected[formats])


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("chunks", [(1, 0, 30, 33, 64), (7, 16, 16, 25, 64), (64, 48, 15, 1)])
def test_chunks_do_not_show(micro, expected, formats: str, chunks) -> None:
    (output,) = micro.run(lambda session: micro.whole(session, chunks), formats=FORMATS[formats])
    assert same(output, expected[formats])


@pytest.mark.parametrize("ranks", [1, 2])
def test_arrangements_give_the_same_bits(micro, expected, ranks: int) -> None:
    for output in micro.run(micro.whole, reuse="off", formats=FORMATS["fp8"], ranks=ranks):
        assert same(output, expected["fp8"])


@pytest.mark.parametrize("reuse", ["on", "off"])
def test_poison_does_not_show(micro, expected, reuse: str) -> None:
    def main(session):
        rows = micro.hidden(128)
        for pattern in PATTERNS:
            outputs = []
            for at in (0, 64):
                poison(session.arena, pattern, visible=at + 64, seed=at)
                outputs.append(session.prefill(rows[at : at + 64], at, copy=True))
            assert same(torch.cat(outputs), expected["fp8"]), pattern
        return True

    assert all(micro.run(main, ranks=2, reuse=reuse, formats=FORMATS["fp8"]))


@pytest.mark.parametrize("reuse", ["on", "off"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_no_kernel_writes_beyond_its_declaration(micro, reuse: str, ranks: int) -> None:
    def main(session):
        canaries, watcher = SlackCanaries(session.arena, 1), WriteWatcher(session.arena)
        micro.whole(session, (40, 3, 0, 64), hooks=watcher)
        return [str(v) for v in watcher.violations] + canaries.damage(), watcher.checked

    for found, checked in micro.run(main, ranks=ranks, reuse=reuse):
        assert found == []
        assert checked > 0


@pytest.mark.parametrize("formats", FORMATS)
def test_sealed_replays_allocate_nothing(micro, formats: str) -> None:
    def main(session):
        rows = micro.hidden(64)
        for history, count in ((64, 64), (0, 0), (17, 1), (0, 63)) * 5:
            session.prefill(rows, history, rows=count, guard=True)
        still = changes(session.at_seal, counters(session.arena))
        with meter(session.arena, torch_memory=True) as reading:
            session.prefill(rows, 64)
        return still + reading.changes(), reading.torch_total

    ((moved, torch_total),) = micro.run(main, formats=FORMATS[formats])
    assert moved == []
    assert torch_total == 0


def test_sealed_replays_on_ranks_allocate_nothing(micro) -> None:
    def main(session):
        micro.whole(session, guard=True)
        return changes(session.at_seal, counters(session.arena))

    for moved in micro.run(main, ranks=4):
        assert [line for line in moved if not line.startswith("heap_large")] == []


def test_prepared_state_is_zero_and_mapped_as_planned(micro) -> None:
    def main(session):
        for kind in ("persistent", "signal", "reusable", "staging"):
            assert not session.arena.segment(kind).any(), kind
        return arena_pss(session.arena), {s.kind: -(-s.nbytes // PAGE) * PAGE for s in session.plan.segments}

    for pss, planned in micro.run(main, ranks=2):
        assert pss == planned


def test_the_result_is_a_view_unless_copied(micro) -> None:
    def main(session):
        rows = micro.hidden(4)
        view, copy = session.prefill(rows, 0), session.prefill(rows, 0, copy=True)
        assert view.data_ptr() == session.arena.address("output")
        assert copy.data_ptr() != session.arena.address("output")
        assert same(view, copy)
        assert session.prefill(rows[:0], 4).shape == (0, 64)
        return True

    assert micro.run(main) == [True]


def refused(session, *arguments, error=CapacityError, **more) -> str:
    """The message of a refusal that touched no byte."""
    before = digest(session)
    with pytest.raises(error) as caught:
        session.prefill(*arguments, **more)
    assert digest(session) == before
    return str(caught.value)


def test_capacity_is_refused_with_both_numbers_before_a_byte_is_touched(micro) -> None:
    def main(session):
        rows = micro.hidden(65)
        text = refused(session, rows, 0)
        assert "65 rows" in text
        assert "64 are prepared" in text
        text = refused(session, rows[:64], 65)
        assert "129 tokens" in text
        assert "128 are prepared" in text
        assert "63 rows" in text
        for history, count in ((-1, 1), (True, 1), (1.0, 1), (0, -1), (129, 0)):
            refused(session, rows, history, rows=count)
        assert session.prefill(rows[:64], 64).shape == (64, 64)  # exactly full is fine
        assert session.prefill(rows[:0], 128).shape == (0, 64)
        return True

    assert micro.run(main) == [True]


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (torch.zeros(4, 63), ["[4, 63]", "[rows, 64]"]),
        (torch.zeros(4, 1, 64), ["[4, 1, 64]"]),
        (torch.zeros(64), ["[64]"]),
        (torch.tensor(0.0), ["[]"]),
        (torch.zeros(4, 64, dtype=torch.float64), ["torch.float64", "fp32"]),
        (torch.zeros(4, 64, device="meta"), ["meta"]),
    ],
)
def test_wrong_hidden_rows_are_refused(micro, hidden, words) -> None:
    def main(session):
        text = refused(session, hidden, 0, error=UserError)
        assert all(word in text for word in words), text
        refused(session, micro.hidden(4), 0, rows=5, error=UserError)
        refused(session, micro.hidden(4), 0, ids=torch.zeros(4, 24, dtype=torch.int32), error=UserError)
        return True

    assert micro.run(main) == [True]


def test_a_shared_layer_attends_to_the_ids_it_is_given(micro) -> None:
    rows = micro.hidden(64)

    def full(session):
        session.prefill(rows, 0)
        return session.arena.view("ids").clone(), session.arena.view("counts").clone()

    (ids, counts), *_ = micro.run(full)

    def shared(session):
        assert "index_history" not in session.program.by_name
        output = session.prefill(rows[:40], 0, ids=ids[:40], counts=counts[:40], copy=True)
        empty = session.prefill(rows[:0], 40, ids=ids[:0], counts=counts[:0])
        assert empty.shape == (0, 64)
        assert "takes ['ids', 'counts']" in refused(session, rows[:4], 0, error=UserError)
        assert "[4, 24]" in refused(session, rows[:4], 0, ids=ids[:3], counts=counts[:4], error=UserError)
        far, negative = ids[:4].clone(), counts[:4].clone()
        far[2, 1] = 3
        assert "row 2" in refused(session, rows[:4], 0, ids=far, counts=counts[:4], error=UserError)
        negative[1] = -1
        assert "row 1" in refused(session, rows[:4], 0, ids=ids[:4], counts=negative, error=UserError)
        return output

    one, *_ = micro.run(shared, layer=1)
    for output in micro.run(shared, layer=1, ranks=4):
        assert same(output, one)

    def wholly(session):
        return session.prefill(rows[:40], 0, copy=True)

    assert same(micro.run(wholly)[0], one)  # the same weights and the same ids


def test_close_releases_every_mapping(micro) -> None:
    before = len(mappings())
    seen = micro.run(lambda session: len(mappings([s.inode for s in session.arena.segments.values()])), ranks=2)
    assert min(seen) > 0
    assert len(mappings()) == before


def test_a_closed_session_says_so(micro) -> None:
    def main(session):
        session.prefill(micro.hidden(2), 0)
        assert session.close() == []
        assert session.close() == []
        with pytest.raises(UserError, match="closed"):
            session.prefill(micro.hidden(2), 0)
        return True

    assert micro.run(main) == [True]


def test_ranks_that_pass_different_chunks_are_told(micro) -> None:
    def main(session):
        session.prefill(micro.hidden(4), session.comm.rank)

    before = len(mappings())
    with pytest.raises(RankError, match="history 1, rows 4"):
        micro.run(main, ranks=2)
    assert len(mappings()) == before


def test_prepare_refuses_and_leaves_nothing(micro) -> None:
    geometry = micro.geometry()
    program = layer_program(geometry, Limits(128, 64, 1, 16), Formats(activation="fp32"), 0)
    other = layer_program(geometry, Limits(128, 64, 2, 16), Formats(activation="fp32"), 0)
    steps = {s.name: s for s in program.steps}
    order = [s.name for s in program.steps]
    a, b = order.index("index_select"), order.index("gather_latent")
    order[a], order[b] = order[b], order[a]
    swapped = program.with_steps(tuple(steps[name] for name in order))
    plan, fill, before = place(program), synthetic(1, micro.tables(geometry)), len(mappings())

    def attempt(error, made, planned, text, **more):
        def main(comm):
            with pytest.raises(error, match=text):
                prepare(made, planned, comm=comm, **{"fill": fill, **more})

        run_local(1, main)
        assert len(mappings()) == before

    attempt(PlanRefused, swapped, plan, "index_select")
    attempt(PlanRefused, other, plan, "the plan gives")
    attempt(BadConfig, other, place(other), "is for 2 ranks and runs on 1")
    attempt(UnknownName, program, plan, "engine", engine="magic")
    attempt(UnknownName, program, plan, "op of step", implementations={})
    attempt(BadConfig, program, plan, "tables", fill=synthetic(1))


def test_plans_that_differ_between_ranks_are_refused(micro) -> None:
    geometry = micro.geometry()
    program = layer_program(geometry, Limits(128, 64, 2, 16), Formats(activation="fp32"), 0)

    def main(comm):
        with prepare(program, place(program, ("on", "off")[comm.rank]), comm=comm, fill=synthetic(1, micro.tables(geometry))):
            pass

    with pytest.raises(RankError, match="plan"):
        run_local(2, main)


@pytest.mark.parametrize("seed", range(3))
def test_schedules_of_the_ranks_do_not_show(micro, expected, seed: int) -> None:
    geometry, formats = micro.geometry(), FORMATS["fp8"]
    program = layer_program(geometry, Limits(128, 64, 4, 16), formats, 0)
    plan = place(program)

    def main(comm):
        with prepare(program, plan, comm=comm, fill=synthetic(1, micro.tables(geometry))) as session:
            return micro.whole(session)

    for output in run_local(4, main, seed=seed):
        assert same(output, expected["fp8"])


def test_a_gated_layer_without_rope(micro) -> None:
    made = micro.geometry("none", gate=True)
    assert not micro.tables(made)
    one, *_ = micro.run(micro.whole, made=made, formats=FORMATS["fp8"])
    for output in micro.run(lambda s: micro.whole(s, (5, 59, 64)), made=made, formats=FORMATS["fp8"], ranks=2):
        assert same(output, one)
