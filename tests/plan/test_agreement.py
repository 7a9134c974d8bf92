"""The placer, the checker and the stand-alone verifier agree on thousands of random programs; planted violations are found."""

import json

import pytest
from random_programs import random_program, violations

from palimpsest.core.errors import PlanRefused
from palimpsest.plan.certificate import certify
from palimpsest.plan.check import check
from palimpsest.plan.file import plan_tree
from palimpsest.plan.lifetime import Lifetimes
from palimpsest.plan.place import assemble, place
from palimpsest.plan.verify import verify_tree


def accepted(made, plan) -> bool:
    try:
        check(made, plan)
    except PlanRefused:
        return False
    return True


def truthful(tree, plan) -> bool:
    return verify_tree({**tree, "plan": json.loads(plan.to_json())}).ok


def agree(seeds: range) -> dict[str, int]:
    """How many programs, hand-overs, violations and dice placements were looked at."""
    seen = {"programs": 0, "handovers": 0, "violations": 0, "dice safe": 0, "dice unsafe": 0, "queues": 0}
    for seed in seeds:
        made = random_program(seed)
        plan = place(made, restarts=6, placers=seed % 16 == 0)
        check(made, plan)
        tree = plan_tree(made, plan)
        report = verify_tree(tree)
        assert report.ok, (seed, report.faults)
        seen["programs"] += 1
        seen["handovers"] += len(plan.handovers)
        seen["queues"] += len({s.queue for s in made.steps}) > 1
        for what, bad in violations(made, plan, seed):
            seen["violations"] += 1
            assert not accepted(made, bad), (seed, what)
            assert not truthful(tree, bad), (seed, what)
        dice(made, tree, seed, seen)
    return seen


def dice(made, tree, seed: int, seen: dict[str, int]) -> None:
    """A placement by chance: lifetimes, checker and verifier say the same about it."""
    lifetimes = Lifetimes(made)
    unit = max(made.by_name[n].align for n in lifetimes.names)
    offsets = {name: unit * ((seed >> k) * (k + 3) % 5) for k, name in enumerate(lifetimes.names)}
    plan = assemble(lifetimes, offsets, "on", "dice")
    if plan.peak < plan.lower_bound:
        return
    size = {name: made.by_name[name].nbytes for name in offsets}
    safe = all(
        lifetimes.may_share(a, b)
        for a in offsets
        for b in offsets
        if a < b and offsets[a] < offsets[b] + size[b] and offsets[b] < offsets[a] + size[a]
    )
    assert accepted(made, plan) is safe, seed
    assert truthful(tree, plan) is safe, seed
    seen["dice safe" if safe else "dice unsafe"] += 1


@pytest.mark.slow
def test_two_thousand_random_programs():
    seen = agree(range(2000))
    assert seen["violations"] > 10_000
    assert min(seen.values()) > 100


@pytest.mark.nightly
def test_ten_thousand_random_programs():
    assert agree(range(2000, 12_000))["programs"] == 10_000


def test_a_plan_with_a_missing_order_has_no_chain():
    """What the certifier cannot order it says: an empty certificate, which nobody accepts."""
    made = next(m for m in map(random_program, range(500)) if len(m.all_buffers) > 3)
    lifetimes = Lifetimes(made)
    assert any(not h.chains for h in certify(lifetimes, dict.fromkeys(lifetimes.names, 0)))
