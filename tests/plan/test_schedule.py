"""More than one queue, and two requests: overlaps are accepted only when every allowed schedule orders them."""

import json

import pytest
from plan_cases import buffer, k31_program, latent_first, program, step

from palimpsest.core.errors import BadConfig, PlanRefused
from palimpsest.plan.check import check
from palimpsest.plan.file import plan_tree
from palimpsest.plan.lifetime import Lifetimes
from palimpsest.plan.place import assemble, place
from palimpsest.plan.plan import Pin, Plan
from palimpsest.plan.schedule import interleaved, on_queues, renamed
from palimpsest.plan.verify import verify_tree

COPY = {"gather_index": "copy", "gather_latent": "copy"}
HISTORIES = ("index_history", "latent_history")


def small():
    return k31_program(1 << 18, 256, 4)


def shared_pair(plan, a, b):
    return [o for o in plan.overlaps if {o.early, o.late} == {a, b}]


def waiting(made, who, whom):
    """The same program where step ``who`` also waits for step ``whom``."""
    from dataclasses import replace

    return made.with_steps(tuple(replace(s, after=(*s.after, whom)) if s.name == who else s for s in made.steps))


def test_a_copy_queue_gets_the_events_its_data_needs():
    made = on_queues(small(), COPY)
    steps = {s.name: s for s in made.steps}
    assert steps["gather_index"].after == ("append_index",)
    assert steps["index_select"].after == ("gather_index",)
    assert {s.queue for s in made.steps} == {"copy", "main"}
    Lifetimes(made)
    with pytest.raises(BadConfig, match="no step 'gather'"):
        on_queues(small(), {"gather": "copy"})


def test_on_a_copy_queue_the_histories_share_only_when_the_copy_waits():
    """The copy of the latent may run ahead of the scoring: without an event the histories lie apart, with one they share."""
    ahead = on_queues(small(), COPY)
    plan = place(ahead)
    check(ahead, plan)
    assert not shared_pair(plan, *HISTORIES)
    late = waiting(ahead, "gather_latent", "selection_barrier")
    shared = place(late)
    check(late, shared)
    assert shared_pair(shared, *HISTORIES)
    assert shared.peak == shared.lower_bound < plan.peak
    (hand,) = [h for h in shared.handovers if (h.early, h.late) == HISTORIES]
    assert hand.chains == (
        ("gather_index", "index_select", "selection_barrier", "gather_latent"),
        ("index_select", "selection_barrier", "gather_latent"),
    )


def test_an_overlap_without_the_event_is_refused_naming_both_accesses():
    ahead = on_queues(small(), COPY)
    late = waiting(ahead, "gather_latent", "selection_barrier")
    plan = place(late)
    with pytest.raises(PlanRefused) as caught:
        check(ahead, plan)
    for word in ("steps index_select and gather_latent may run at the same time", "index_select reads index_history",
                 "gather_latent writes latent_history", "shared bytes", "(after)"):  # fmt: skip
        assert word in str(caught.value)
    report = verify_tree(plan_tree(ahead, plan))
    assert any("nothing orders step selection_barrier before step gather_latent" in fault for fault in report.faults)


def test_the_latent_first_schedule_is_refused():
    made = latent_first(small())
    pins = (Pin("latent_history", 0), Pin("index_history", 0))
    with pytest.raises(
        PlanRefused, match=r"pins put .*common bytes, but step \w+ uses (index|latent)_history and step \w+ uses .* interleave"
    ):
        place(made, pins=pins)
    report = verify_tree({**plan_tree(made, place(made)), "plan": json.loads(place(small()).to_json())})
    assert any("index_select" in fault or "gather_index" in fault for fault in report.faults)


def test_a_missing_barrier_across_ranks_is_refused_with_the_two_accesses():
    made = small()
    without = made.with_steps(tuple(s for s in made.steps if s.scope != "all"))
    with pytest.raises(
        PlanRefused,
        match=r"step index_select uses index_history and step gather_latent uses latent_history, and no step that all 4",
    ):
        place(without, pins=(Pin("latent_history", 0), Pin("index_history", 0, "latent_history")))
    unfenced = assemble(
        Lifetimes(without), {p.buffer: p.offset for p in place(made).places if p.kind == "reusable"}, "on", "hand"
    )
    with pytest.raises(
        PlanRefused, match=r"gather_latent touches latent_history .* index_select uses for index_history.*put a barrier"
    ):
        check(without, unfenced)
    report = verify_tree(plan_tree(without, unfenced))
    assert report.faults == [
        "step gather_latent writes bytes that step index_select uses on another of 4 ranks (index_history and latent_history "
        "share 34,603,008 bytes), and no step that all ranks reach lies between"
    ]


@pytest.mark.parametrize("own_queues", [False, True])
def test_two_requests_on_one_backing_are_refused(own_queues):
    made = interleaved(small(), small(), own_queues=own_queues)
    if own_queues:
        with pytest.raises(
            PlanRefused, match=r"pins put a.latent_history and b.latent_history .*some schedule runs these two in either order"
        ):
            place(made, pins=(Pin("a.latent_history", 0), Pin("b.latent_history", 0)))
    else:
        with pytest.raises(
            PlanRefused, match=r"step a.sparse_attend uses a.latent_history and step b.gather_latent uses b.latent_history"
        ):
            place(made, pins=(Pin("a.latent_history", 0), Pin("b.latent_history", 0, "a.latent_history")))
    plan = place(made)
    check(made, plan)
    assert not shared_pair(plan, "a.latent_history", "b.latent_history")
    assert plan.peak >= 2 * (1 << 18) * 576


def test_two_requests_one_after_the_other_share_everything():
    one = small()
    made = interleaved(one, one, turn=len(one.steps))
    plan = place(made)
    check(made, plan)
    assert verify_tree(plan_tree(made, plan)).ok
    # the first request's output is kept for the caller while the second one runs
    assert plan.peak == place(one).peak + made.by_name["a.output"].nbytes
    assert len([b for b in made.buffers if b.kind == "weights"]) == len([b for b in one.buffers if b.kind == "weights"])


def test_requests_on_queues_of_their_own_share_nothing():
    """Nothing orders them: no byte of one may be a byte of the other."""
    made = interleaved(small(), small(), own_queues=True)
    plan = place(made)
    check(made, plan)
    assert not [o for o in plan.overlaps if o.early[0] != o.late[0]]
    forged = assemble(Lifetimes(made), dict.fromkeys(Lifetimes(made).names, 0), "on", "hand")
    with pytest.raises(PlanRefused):
        check(made, forged)


def test_a_chain_goes_through_the_events_that_order_it():
    steps = [
        step("w", writes="a", queue="x"), step("r", reads="a", queue="x"),
        step("hop", queue="y", after=("r",)), step("rest", queue="y"),
        step("late", writes="b", queue="z", after=("rest",)),
    ]  # fmt: skip
    made = program([buffer("a", 16), buffer("b", 16)], steps, outputs=("b",))
    plan = place(made)
    check(made, plan)
    (hand,) = plan.handovers
    assert hand.chains == (("r", "hop", "rest", "late"),)
    assert verify_tree(plan_tree(made, plan)).ok


def test_a_buffer_read_on_two_queues_is_handed_over_with_two_chains():
    steps = [
        step("w", writes="a", queue="x"), step("r", reads="a", queue="x"), step("other", reads="a", queue="y", after=("w",)),
        step("late", writes="b", queue="x", after=("other",)),
    ]  # fmt: skip
    made = program([buffer("a", 16), buffer("b", 16)], steps, outputs=("b",))
    plan = place(made)
    check(made, plan)
    (hand,) = plan.handovers
    assert sorted(hand.chains) == [("other", "late"), ("r", "late")]
    for chains in (hand.chains[:1], hand.chains[1:]):
        tree = plan_tree(made, plan)
        tree["plan"]["handovers"][0]["chains"] = [list(c) for c in chains]
        with pytest.raises(PlanRefused, match="last uses of a are"):
            check(made, Plan.from_json(json.dumps(tree["plan"])))
        assert any("nothing orders all of them" in fault for fault in verify_tree(tree).faults)


def test_requests_need_one_set_of_limits_and_weights():
    with pytest.raises(BadConfig, match="one set of limits"):
        interleaved(small(), k31_program(4096, 256, 4))
    assert renamed(small(), "a.").by_name["w.q_a"] == small().by_name["w.q_a"]
