"""Lifetimes are derived: intervals, gaps, partial orders, and what is refused."""

import pytest
from hypothesis import given, settings
from plan_cases import buffer, k31_program, latent_first, program, programs, step

from palimpsest.core.errors import PlanRefused
from palimpsest.core.spec import Limits
from palimpsest.plan.lifetime import START, Lifetimes


def lives(made, name):
    return [life.accesses for life in Lifetimes(made).ranges[name]]


def test_one_queue_is_an_interval_from_first_to_last_access():
    made = program(
        [buffer("a", 8), buffer("b", 8)], [step("s0", writes="a"), step("s1", reads="a", writes="b"), step("s2", reads="b")]
    )
    assert lives(made, "a") == [(0, 1)]
    assert lives(made, "b") == [(1, 2)]
    assert not Lifetimes(made).may_share("a", "b")


def test_an_input_lives_from_the_start_and_an_output_to_the_end():
    made = program([buffer("i", 8), buffer("o", 8)], [step("s0", reads="i"), step("s1", writes="o"), step("s2")],
                   inputs=("i",), outputs=("o",))  # fmt: skip
    assert lives(made, "i") == [(START, 0)]
    assert lives(made, "o") == [(1, 3)]
    assert Lifetimes(made).may_share("i", "o")


def test_a_rewrite_opens_a_gap_and_an_update_does_not():
    gap = [
        step("s0", writes="a"),
        step("s1", reads="a"),
        step("s2", writes="b"),
        step("s3", reads="b"),
        step("s4", writes="a"),
        step("s5", reads="a"),
    ]
    made = program([buffer("a", 8), buffer("b", 8)], gap)
    assert lives(made, "a") == [(0, 1), (4, 5)]
    assert Lifetimes(made).may_share("a", "b")
    kept = program([buffer("a", 8), buffer("b", 8)], [*gap[:4], step("s4", updates="a"), gap[5]])
    assert lives(kept, "a") == [(0, 1, 4, 5)]
    assert not Lifetimes(kept).may_share("a", "b")
    both = program([buffer("a", 8), buffer("b", 8)], [*gap[:4], step("s4", reads="a", writes="a"), gap[5]])
    assert lives(both, "a") == [(0, 1, 4, 5)]


def test_a_read_of_undefined_bytes_names_step_and_buffer():
    made = program([buffer("a", 8)], [step("s0"), step("early_reader", reads="a"), step("s2", writes="a")])
    with pytest.raises(PlanRefused, match=r"step early_reader reads a before any step has written it"):
        Lifetimes(made)
    with pytest.raises(PlanRefused, match=r"step u reads a before"):
        Lifetimes(program([buffer("a", 8)], [step("u", updates="a")]))
    with pytest.raises(PlanRefused, match=r"output a is never written"):
        Lifetimes(program([buffer("a", 8)], [step("s0")], outputs=("a",)))


@pytest.mark.parametrize("kind", ["weights", "persistent", "table", "signal", "staging"])
def test_bytes_that_outlive_the_program_may_be_read_first(kind):
    made = program([buffer("w", 8, kind=kind), buffer("a", 8)], [step("s0", reads="w", writes="a")])
    assert Lifetimes(made).names == ("a",)


def test_a_buffer_nobody_touches_is_refused():
    with pytest.raises(PlanRefused, match="ghost is declared but no step touches it"):
        Lifetimes(program([buffer("ghost", 8)], [step("s0")]))


def two_queues(event: bool):
    after = ("r",) if event else ()
    return program(
        [buffer("a", 8), buffer("b", 8)],
        [step("w", writes="a", queue="x"), step("r", reads="a", queue="x"), step("copy", writes="b", queue="y", after=after)],
        outputs=("b",),
    )


def test_two_queues_share_only_across_an_event():
    assert not Lifetimes(two_queues(event=False)).may_share("a", "b")
    assert Lifetimes(two_queues(event=True)).may_share("a", "b")


def test_happens_before_is_transitive_through_a_third_queue():
    made = program(
        [buffer("a", 8), buffer("b", 8)],
        [
            step("w", writes="a", queue="x"),
            step("hop", queue="y", after=("w",)),
            step("late", writes="b", queue="z", after=("hop",)),
        ],
        outputs=("b",),
    )
    assert Lifetimes(made).may_share("a", "b")


def test_a_race_on_one_buffer_is_refused_by_name():
    made = program([buffer("a", 8)], [step("w", writes="a", queue="x"), step("r", reads="a", queue="y")])
    with pytest.raises(PlanRefused, match=r"steps w and r both touch a.*nothing orders them"):
        Lifetimes(made)


def test_histories_need_a_barrier_of_all_ranks_when_there_are_several():
    steps = [step("w", writes="a"), step("r", reads="a"), step("fence", scope="all"), step("x", writes="b")]
    more = {"histories": ("a", "b"), "outputs": ("b",), "limits": Limits(64, 16, 2)}
    buffers = [buffer("a", 8), buffer("b", 8)]
    assert Lifetimes(program(buffers, steps, **more)).may_share("a", "b")
    without = [s for s in steps if s.name != "fence"]
    assert not Lifetimes(program(buffers, without, **more)).may_share("a", "b")
    assert Lifetimes(program(buffers, without, **{**more, "limits": Limits(64, 16, 1)})).may_share("a", "b")
    outside = [steps[2], *without]
    assert not Lifetimes(program(buffers, outside, **more)).may_share("a", "b")


def test_the_k31_histories_may_share_because_of_the_order_of_steps():
    made = k31_program()
    assert Lifetimes(made).may_share("index_history", "latent_history")
    assert not Lifetimes(latent_first(made)).may_share("index_history", "latent_history")


@settings(max_examples=60, deadline=None)
@given(programs(queues=2))
def test_buffers_alive_together_never_may_share(made):
    found = Lifetimes(made)
    for names in found.live:
        for i, a in enumerate(names):
            assert all(not found.may_share(a, b) for b in names[i + 1 :])
    assert found.lower_bound == max(found.live_bytes())
    assert all(found.may_share(a, b) == found.may_share(b, a) for a in found.names for b in found.names if a != b)
