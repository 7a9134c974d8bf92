"""The checker refuses what is unsafe or untrue, says why, and agrees with a twin that runs every schedule on real bytes."""

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import buffer, k31_program, latent_first, program, programs, step, swapped
from twin import safe

import palimpsest.plan.check
import palimpsest.plan.replay
from palimpsest.core.errors import BadConfig, PlanRefused
from palimpsest.core.spec import Limits
from palimpsest.plan.check import check
from palimpsest.plan.lifetime import Lifetimes
from palimpsest.plan.place import assemble, place
from palimpsest.plan.plan import Handover, Pin, Segment


def move(plan, name, **changes):
    return dataclasses.replace(
        plan, places=tuple(dataclasses.replace(p, **changes) if p.buffer == name else p for p in plan.places)
    )


def refused(made, plan, *words, **more):
    with pytest.raises(PlanRefused) as caught:
        check(made, plan, **more)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"


SIMPLE = program(
    [buffer("a", 64), buffer("b", 32), buffer("w", 16, kind="weights"), buffer("v", 16, kind="weights")],
    [step("s0", writes="a", reads="w v"), step("s1", reads="a"), step("s2", writes="b"), step("s3", reads="b")],
)


def test_swapping_the_two_gathers_names_step_buffers_ranges_and_shared_bytes():
    made = k31_program()
    refused(
        swapped(made), place(made),
        "step index_select reads index_history [0, 138,412,032)", "step gather_latent wrote latent_history [0, 603,979,776)",
        "138,412,032 shared bytes", "plan this program again",
    )  # fmt: skip


def test_gathering_the_latent_first_names_step_buffers_ranges_and_shared_bytes():
    made = k31_program()
    refused(
        latent_first(made), place(made),
        "step sparse_attend reads latent_history [0, 603,979,776)", "step gather_index wrote index_history [0, 138,412,032)",
        "138,412,032 shared bytes",
    )  # fmt: skip


def test_the_arrangement_without_reuse_survives_the_swap_only_as_another_program():
    """Bytes of its own make the order harmless to the histories, but other slots still depend on it; and the digest differs."""
    made = k31_program()
    refused(swapped(made), place(made, "off"), "index_select")


def test_dropping_the_barrier_is_refused_for_several_ranks():
    made = k31_program()
    without = made.with_steps(tuple(s for s in made.steps if s.scope != "all"))
    refused(
        without, place(made), "step gather_latent", "step index_select", "16 ranks", "138,412,032", "put a barrier between them"
    )


def test_a_plan_of_another_program_is_refused_even_when_its_bytes_are_safe():
    other = dataclasses.replace(SIMPLE, name="other")
    refused(other, place(SIMPLE), "program name", "plan this program again")
    refused(dataclasses.replace(SIMPLE, facts=(("x", 1),)), place(SIMPLE), "program digest")
    refused(dataclasses.replace(SIMPLE, limits=Limits(128, 16, 1)), place(SIMPLE), "limits")


def test_planted_structure_faults_are_refused():
    plan = place(SIMPLE)
    check(SIMPLE, plan)
    refused(SIMPLE, dataclasses.replace(plan, places=plan.places[1:]), "does not place a")
    refused(SIMPLE, dataclasses.replace(plan, places=(*plan.places, plan.places[0])), "places a 2 times")
    refused(SIMPLE, move(plan, "a", buffer="ghost"), "places ghost")
    refused(SIMPLE, move(plan, "a", nbytes=63), "bytes 63", "declares 64")
    refused(SIMPLE, move(plan, "a", kind="staging"), "kind staging", "declares reusable")
    refused(SIMPLE, move(plan, "a", align=1), "alignment 1", "declares 16")
    refused(SIMPLE, move(plan, "b", offset=8), "offset 8", "multiple of 16")
    refused(SIMPLE, move(plan, "b", offset=-16), "offset -16")
    refused(SIMPLE, move(plan, "w", offset=16), "w", "v", "share 16 bytes of the weights segment")
    refused(SIMPLE, move(plan, "b", first="s1"), "b lives from s1 to s3; it lives from s2 to s3")
    refused(SIMPLE, dataclasses.replace(plan, reuse="maybe"), "'on' or 'off'")


def test_planted_segment_faults_are_refused():
    plan = place(SIMPLE)
    weights, reusable = plan.segments

    def segments(*found):
        return dataclasses.replace(plan, segments=found)

    refused(SIMPLE, segments(weights, Segment("reusable", 63)), "a needs bytes [0, 64) but the reusable segment has 63 bytes")
    refused(SIMPLE, segments(weights, Segment("reusable", 1 << 40)), "serve nobody")
    refused(SIMPLE, segments(reusable), "segments ['reusable']")
    refused(SIMPLE, segments(reusable, weights), "segments")
    refused(SIMPLE, segments(weights, reusable, Segment("table", 0)), "segments")


def test_planted_claims_are_refused():
    plan = place(SIMPLE)
    (pair,) = plan.handovers
    assert (pair.early, pair.late, pair.chains) == ("a", "b", (("s1", "s2"),))
    edits = [
        (),
        (dataclasses.replace(pair, stop=31),),
        (dataclasses.replace(pair, chains=()),),
        (dataclasses.replace(pair, chains=(("hope", "s2"),)),),
        (dataclasses.replace(pair, chains=(("s0", "s2"),)),),
        (dataclasses.replace(pair, chains=(("s1", "s3", "s2"),)),),
        (dataclasses.replace(pair, chains=(("s1", "s2"), ("s1", "s2"))),),
        (pair, Handover("a", "w", 0, 1, (("s0", "s1"),))),
        (Handover("b", "a", pair.start, pair.stop, pair.chains),),
    ]
    for edited in edits:
        refused(SIMPLE, dataclasses.replace(plan, handovers=edited), "overlap")
    refused(SIMPLE, dataclasses.replace(plan, handovers=(pair, pair)), "twice")
    refused(SIMPLE, move(plan, "b", begin=4), "b lives from s2 to s3")
    refused(SIMPLE, dataclasses.replace(plan, pins=(Pin("b", 16),)), "b is pinned to 16", "puts it at 0")
    for bound in (63, 65, 0):
        refused(SIMPLE, dataclasses.replace(plan, lower_bound=bound), "lower bound", "64")


def test_reuse_off_with_shared_histories_is_a_lie():
    made = k31_program(4096, 64, 2)
    refused(made, dataclasses.replace(place(made), reuse="off"), "reuse off", "index_history", "latent_history", "540,672")


def test_two_buffers_of_one_step_may_not_share():
    made = program(
        [buffer("a", 16), buffer("b", 16)], [step("s0", writes="a"), step("s1", reads="a", writes="b")], outputs=("b",)
    )
    plan = assemble(Lifetimes(made), {"a": 0, "b": 0}, "on", "hand")
    refused(made, plan, "s1", "a [0, 16)", "b [0, 16)", "share 16 bytes")


def test_undefined_bytes_are_refused():
    made = program([buffer("a", 16)], [step("s0", writes="a"), step("s1", reads="a")])
    plan = place(made)
    backwards = made.with_steps(made.steps[::-1])
    refused(backwards, plan, "step s1 reads a [0, 16)", "never written")


def test_an_output_overwritten_before_the_end_is_refused():
    made = program([buffer("o", 16), buffer("b", 16)], [step("s0", writes="o"), step("s1", writes="b")], outputs=("o",))
    refused(made, assemble(Lifetimes(made), {"o": 0, "b": 0}, "on", "hand"), "end", "o [0, 16)", "s1 wrote b")


def test_two_inputs_on_one_byte_are_refused():
    made = program([buffer("i", 16), buffer("j", 16)], [step("s0", reads="i"), step("s1", reads="j")], inputs=("i", "j"))
    refused(made, assemble(Lifetimes(made), {"i": 0, "j": 0}, "on", "hand"), "i [0, 16)", "j [0, 16)")


def test_steps_of_two_queues_without_an_event_are_refused():
    after = {"after": ("r",)}

    def made(**more):
        return program(
            [buffer("a", 16), buffer("b", 16)],
            [step("w", writes="a", queue="x"), step("r", reads="a", queue="x"), step("copy", writes="b", queue="y", **more)],
            outputs=("b",),
        )

    plan = place(made(**after))
    check(made(**after), plan)
    assert plan.peak == 16
    refused(made(), plan, "may run at the same time", "copy writes b [0, 16)", "a [0, 16)", "16 shared bytes", "after")


def test_kernel_offsets_must_fit_their_index_type():
    made = k31_program(1 << 22)
    plan = place(made)
    check(made, plan)
    refused(made, plan, "latent_history", "2,415,919,103", "2,147,483,647", "32-bit", index_bits=32)
    small = k31_program()
    check(small, place(small), index_bits=32)
    with pytest.raises(BadConfig, match="index_bits"):
        check(made, plan, index_bits=16)


def test_the_largest_32_bit_offset_is_the_last_one_allowed():
    for nbytes, fits in ((1 << 31, True), ((1 << 31) + 1, False)):
        made = program([buffer("a", nbytes)], [step("s0", writes="a")])
        if fits:
            check(made, place(made), index_bits=32)
        else:
            refused(made, place(made), "2,147,483,648", "2,147,483,647", index_bits=32)


def imports(path):
    return {node.module for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.ImportFrom)}


def test_the_checker_shares_no_code_with_the_placer():
    for module in (palimpsest.plan.check, palimpsest.plan.replay):
        assert not imports(module.__file__) & {"palimpsest.plan.place", "palimpsest.plan.lifetime"}
    assert "palimpsest.plan.lifetime" in imports(palimpsest.plan.place.__file__)


def accepted(made, plan):
    try:
        check(made, plan)
    except PlanRefused:
        return False
    return True


@settings(max_examples=250, deadline=None)
@given(programs(queues=1), st.data())
def test_the_checker_agrees_with_the_twin_on_random_placements(made, data):
    unit = Lifetimes(made).granule
    offsets = {b.name: max(unit, b.align) * data.draw(st.integers(0, 5)) for b in made.all_buffers}
    plan = assemble(Lifetimes(made), offsets, "on", "dice")
    assert accepted(made, plan) is safe(made, offsets)


@settings(max_examples=150, deadline=None)
@given(programs(queues=2, most_steps=6, most_buffers=4), st.data())
def test_the_checker_agrees_with_the_twin_on_two_queues(made, data):
    lifetimes = Lifetimes(made)
    offsets = {name: lifetimes.granule * data.draw(st.integers(0, 4)) for name in lifetimes.names}
    plan = assemble(lifetimes, offsets, "on", "dice")
    assume(plan.peak >= plan.lower_bound)
    assert accepted(made, plan) is safe(made, offsets)


def corruptions(plan, data):
    """One random edit of the JSON form, with what it did."""
    tree = json.loads(plan.to_json())
    places, kind = (
        tree["places"],
        data.draw(st.sampled_from(["move", "swap", "shrink", "drop", "overlap", "resize", "bound", "digest"])),
    )
    at = data.draw(st.integers(0, len(places) - 1))
    if kind == "move":
        places[at]["offset"] += data.draw(st.sampled_from([-64, -16, -1, 1, 16, 64]))
    elif kind == "swap":
        other = data.draw(st.integers(0, len(places) - 1))
        places[at]["offset"], places[other]["offset"] = places[other]["offset"], places[at]["offset"]
    elif kind == "shrink":
        tree["segments"][-1]["nbytes"] -= data.draw(st.integers(1, 64))
    elif kind == "drop":
        del places[at]
    elif kind == "overlap" and tree["handovers"]:
        pair = tree["handovers"][data.draw(st.integers(0, len(tree["handovers"]) - 1))]
        pair[data.draw(st.sampled_from(["start", "stop"]))] += 1
    elif kind == "resize":
        places[at]["nbytes"] += data.draw(st.sampled_from([-1, 1]))
    elif kind == "bound":
        tree["lower_bound"] += data.draw(st.sampled_from([-1, 1]))
    else:
        tree["program_digest"] = "0" * 64
    return kind, tree


@settings(max_examples=250, deadline=None)
@given(programs(queues=1), st.data())
def test_a_corrupted_plan_is_refused(made, data):
    plan = place(made, restarts=5)
    kind, tree = corruptions(plan, data)
    bad = dataclasses.replace(plan)
    try:
        bad = type(plan).from_json(json.dumps(tree))
    except ValueError:
        return
    if bad == plan:
        return
    if kind in ("move", "swap", "shrink") and accepted(made, bad):
        assert safe(made, {p.buffer: p.offset for p in bad.places})
        assert max(p.stop for p in bad.places) <= bad.peak
    else:
        assert not accepted(made, bad)
