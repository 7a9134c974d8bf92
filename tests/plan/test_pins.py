"""Pins are kept or refused, identical layers get one address per role, and the optional placer changes nothing it may not."""

import dataclasses
import importlib.util
import json

import pytest
from plan_cases import buffer, k31_program, program, step
from random_programs import random_program

from palimpsest.core.errors import BadConfig, PlanRefused
from palimpsest.plan import omni
from palimpsest.plan.check import check
from palimpsest.plan.file import plan_tree
from palimpsest.plan.fold import fold, role_of
from palimpsest.plan.lifetime import Lifetimes
from palimpsest.plan.place import place
from palimpsest.plan.plan import Pin, Plan
from palimpsest.plan.schedule import joined, renamed
from palimpsest.plan.search import first_fit, search
from palimpsest.plan.verify import verify_tree

LINE = program(
    [buffer(n, 64) for n in "abc"],
    [step("s0", writes="a"), step("s1", reads="a", writes="b"), step("s2", reads="b", writes="c"), step("s3", reads="c")],
)


def layers(count, tokens=8192):
    layer = k31_program(tokens, 256, 4)
    parts = tuple(renamed(layer, f"layer{i:03d}.", kept=()) for i in range(count))
    made = joined("layers", layer.limits, parts, tuple(s for p in parts for s in p.steps))
    return dataclasses.replace(made, outputs=made.outputs[-1:])


def test_absolute_and_relative_pins_are_kept_and_recorded():
    plan = place(LINE, pins=(Pin("c", 256), Pin("b", 96, "a")))
    check(LINE, plan)
    at = {p.buffer: p.offset for p in plan.places}
    assert at["c"] == 256
    assert at["b"] == at["a"] + 96
    with pytest.raises(PlanRefused, match="step s1 uses b and step s1 uses a, and one step needs both"):
        place(LINE, pins=(Pin("b", 32, "a"),))


def test_a_pin_on_bytes_in_use_is_refused_naming_both_steps():
    with pytest.raises(PlanRefused, match=r"pins put b and c on 64 common bytes, but step s2 uses b and step s2 uses c"):
        place(LINE, pins=(Pin("b", 0), Pin("c", 0)))


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ((Pin("ghost", 0),), "no reusable buffer 'ghost'"),
        ((Pin("a", 0, "ghost"),), "no reusable buffer 'ghost'"),
        ((Pin("a", 8),), "multiple of its alignment 16"),
        ((Pin("a", 0), Pin("a", 16)), "pinned twice"),
        ((Pin("a", 0, "b"), Pin("b", 0, "c")), "pinned to another buffer itself"),
        ((Pin("a", 0, "a"),), "pinned to itself"),
    ],
)
def test_impossible_pins_are_refused(pins, words):
    with pytest.raises(BadConfig) as caught:
        place(LINE, pins=pins)
    assert words in str(caught.value)


def test_the_origin_layout_is_a_pin_like_any_other():
    made = k31_program()
    pinned = place(made, pins=(Pin("latent_history", 0), Pin("index_history", 0, "latent_history")))
    check(made, pinned)
    free = place(made)
    assert [(p.buffer, p.offset) for p in pinned.places] == [(p.buffer, p.offset) for p in free.places]
    assert Plan.from_json(pinned.to_json()) == pinned
    with pytest.raises(BadConfig, match="drop the pin"):
        place(made, "off", pins=(Pin("index_history", 0, "latent_history"),))


def test_pins_of_random_programs_are_kept():
    kept = 0
    for seed in range(300):
        made = random_program(seed)
        name = next(b.name for b in made.all_buffers if b.kind == "reusable")
        pin = Pin(name, 3 * max(b.align for b in made.all_buffers))
        plan = place(made, restarts=4, pins=(pin,), placers=seed % 10 == 0)
        check(made, plan)
        assert plan.by_name[name].offset == pin.offset
        assert verify_tree(plan_tree(made, plan)).ok
        kept += 1
    assert kept == 300


def test_a_pin_that_is_not_kept_is_found():
    plan = place(LINE, pins=(Pin("c", 256),))
    tree = plan_tree(LINE, plan)
    tree["plan"]["pins"][0]["offset"] = 128
    with pytest.raises(PlanRefused, match="c is pinned to 128"):
        check(LINE, Plan.from_json(json.dumps(tree["plan"])))
    assert any("c is pinned to 128" in fault for fault in verify_tree(tree).faults)


def test_roles_drop_numbers():
    assert role_of("layer012.query.scratch") == "layer#.query.scratch"
    assert role_of("residual.03") == "residual.#"


def test_identical_layers_have_one_address_per_role():
    one, many = place(layers(1)), place(layers(12))
    check(layers(12), many)
    assert many.peak == many.lower_bound == one.peak
    for place_ in many.places:
        if place_.kind == "reusable":
            assert place_.offset == many.by_name["layer000" + place_.buffer[8:]].offset
    problem = fold(Lifetimes(layers(12)))
    assert problem.folded
    assert len(problem.members) == len(fold(Lifetimes(layers(1))).members)


def test_members_that_are_alive_together_form_classes():
    """Three states of one residual stream, all needed at the end, and a fourth buffer that fits into the first one's bytes."""
    steps = [step(f"s{i}", writes=f"state.{i}") for i in range(3)] + [
        step("sum", reads="state.0 state.1 state.2"),
        step("s4", writes="state.4"),
    ]
    made = program([buffer(f"state.{i}", 64) for i in (0, 1, 2, 4)], steps)
    problem = fold(Lifetimes(made))
    assert sorted(map(len, problem.members)) == [1, 1, 2]
    plan = place(made)
    check(made, plan)
    assert plan.peak == plan.lower_bound == 192


def test_a_folded_search_is_a_placement_of_everything():
    for seed in range(400):
        made = random_program(seed)
        lifetimes = Lifetimes(made)
        folded, flat = fold(lifetimes), fold(lifetimes, whole=False)
        found = search(folded, 3)
        assert folded.holds(found.offsets)
        spread = folded.spread(found.offsets)
        assert flat.holds([spread[names[0]] for names in flat.members])
        assert folded.bound == flat.bound <= found.peak


def test_a_broken_placement_does_not_hold():
    problem = fold(Lifetimes(LINE), (Pin("a", 64),))
    good = list(first_fit(problem, [k for k in range(3) if k not in problem.fixed]).offsets)
    assert problem.holds(good)
    assert not problem.holds([0, *good[1:]])
    assert not problem.holds([good[0], good[0], good[2]])
    assert not problem.holds([good[0], good[1], 8])


@pytest.mark.skipif(importlib.util.find_spec("omnimalloc") is None, reason="the optional placer is not installed")
def test_the_optional_placer_is_named_deterministic_and_never_worse():
    won = set()
    for seed in range(400):
        made = random_program(seed, 14, 14)
        ours, both = place(made, restarts=0, placers=False), place(made, restarts=0)
        check(made, both)
        assert both.peak <= ours.peak
        assert both == place(made, restarts=0)
        if both.peak < ours.peak:
            won.add(both.placer.split("/")[-1])
            assert both.placer.startswith(f"omnimalloc-{omni.version()}/")
        else:
            assert both == ours
    assert won == {"omni", "tabu_search"}


def test_without_the_optional_placer_plans_are_ours(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert omni.version() == ""
    assert place(random_program(7)).placer == "restart-greedy-2"
