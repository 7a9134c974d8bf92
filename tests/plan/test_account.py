"""Accounting: logical and mapped apart, totals that are sums of slots, slopes, and what a saving elsewhere is worth."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import buffer, k31_program, program, programs, step

from palimpsest.core.errors import BadConfig
from palimpsest.core.units import align_up
from palimpsest.plan.account import CPU_GRANULARITY, CUDA_GRANULARITY, account, compare, slope
from palimpsest.plan.place import place


@pytest.fixture(scope="module")
def k31():
    made = k31_program()
    return made, place(made), place(made, "off")


def test_both_arrangements_of_the_k31_layer(k31):
    bill = compare(*k31)
    assert bill.saved_logical == 138_412_032
    assert bill.off.logical - bill.on.logical == 132 * (1 << 20)
    assert bill.on.logical_all_ranks == 16 * bill.on.logical
    assert bill.on.peak == bill.on.lower_bound


def test_mapped_bytes_depend_on_the_granularity_and_logical_bytes_do_not(k31):
    made, plan, _ = k31
    small, large = account(made, plan, CPU_GRANULARITY), account(made, plan, CUDA_GRANULARITY)
    assert small.logical == large.logical == plan.total
    assert large.mapped == sum(align_up(s.nbytes, 2 << 20) for s in plan.segments) > small.mapped >= small.logical
    signals = next(t for t in large.totals if t.kind == "signal")
    assert (signals.logical, signals.mapped) == (128, 2 << 20)


def test_mapped_saving_is_not_the_logical_saving():
    made = k31_program(2112, 64, 2)
    bill = compare(made, place(made), place(made, "off"), 2 << 20)
    assert bill.saved_logical == 132 * 2112
    assert bill.saved_mapped % (2 << 20) == 0


@pytest.mark.parametrize("granularity", [0, -4096, 3000])
def test_an_impossible_granularity_is_refused(k31, granularity):
    with pytest.raises(BadConfig, match="power of two"):
        account(k31[0], k31[1], granularity)


def test_slopes_come_from_the_axes(k31):
    made = k31[0]
    per_token = {b.name: slope(b, made.limits) for b in made.all_buffers}
    assert per_token["index_history"] == 132
    assert per_token["latent_history"] == 576
    assert per_token["index_cache"] == Fraction(132, 16)
    assert per_token["latent_cache"] == Fraction(576, 16)
    assert not any(per_token[name] for name in ("hidden", "ids", "w.q_a", "staging"))


def test_the_slope_predicts_a_larger_context(k31):
    one = account(k31[0], k31[1])
    made = k31_program(1 << 21)
    two = account(made, place(made))
    assert two.logical - one.logical == Fraction(one.per_token) * (1 << 20)
    assert two.fixed == one.fixed


def test_worth_says_what_removing_a_buffer_would_save(k31):
    slots = {s.buffer: s for s in account(k31[0], k31[1]).slots}
    assert slots["index_history"].worth == 0
    assert "sparse_attend peaks at" in slots["index_history"].why
    assert slots["hidden"].worth == slots["hidden"].nbytes
    assert 0 < slots["latent_history"].worth < slots["latent_history"].nbytes
    assert slots["w.q_a"].worth == slots["w.q_a"].nbytes
    assert {s.buffer: s for s in account(k31[0], k31[2]).slots}["index_history"].worth == 138_412_032


def test_the_binding_slots_add_up_to_the_bound(k31):
    bill = account(k31[0], k31[1])
    assert bill.peak_step == "sparse_attend"
    assert bill.peak_live[0] == "latent_history"
    assert sum(align_up(s.nbytes, 64) for s in bill.slots if s.at_peak) == bill.lower_bound


def test_removing_the_buffer_saves_what_worth_said():
    steps = [step("s0", writes="a b"), step("s1", reads="a b"), step("s2", writes="c"), step("s3", reads="c")]
    made = program([buffer("a", 64), buffer("b", 32), buffer("c", 80)], steps)
    slots = {s.buffer: s.worth for s in account(made, place(made)).slots}
    assert slots == {"a": 16, "b": 16, "c": 0}


@settings(max_examples=80, deadline=None)
@given(programs(queues=2), st.sampled_from([1, 64, 4096]))
def test_totals_are_sums_of_slots(made, granularity):
    plan = place(made, restarts=3)
    bill = account(made, plan, granularity)
    for total in bill.totals:
        inside = [s.nbytes for s in bill.slots if s.kind == total.kind]
        assert total.slots == sum(inside)
        assert total.logical == total.slots - total.shared + total.idle <= total.mapped < total.logical + granularity
    assert bill.logical == sum(t.logical for t in bill.totals)
    assert bill.apart == sum(s.nbytes for s in bill.slots)
    assert all(s.worth >= 0 for s in bill.slots)
