"""What the loader refuses before a program is loaded, each planted in a good manifest and named."""

import copy

import pytest

from palimpsest.export.replay import apart, late_first
from palimpsest_loader.check import check_machine, check_plan, cpu_flags, lives
from palimpsest_loader.errors import BadCore, WrongMachine


def step(tree: dict, name: str) -> dict:
    return next(s for s in tree["steps"] if s["name"] == name)


def argument(tree: dict, name: str, buffer: str) -> dict:
    return next(a for p in step(tree, name)["passes"] for a in p["args"] if a["buffer"] == buffer)


def test_good_plans_pass(tree) -> None:
    check_plan(tree)
    check_plan(apart(tree))


def test_wrong_order_is_refused(tree) -> None:
    with pytest.raises(BadCore, match=r"index_history and latent_history share bytes.*gather_latent: the order is wrong"):
        check_plan(late_first(tree))


def test_wrong_order_is_fine_when_nothing_is_shared(tree) -> None:
    check_plan(apart(late_first(tree)))


def test_overlap_inside_a_stage_is_refused(tree) -> None:
    """Arguments of one program that share bytes: the design that compiles silently to something else."""
    place = tree["buffers"]["query"]
    tree["buffers"]["q_latent"]["offset"] = place["offset"]
    with pytest.raises(BadCore, match=r"step attention_query: arguments q_latent and query share bytes.*inside one program"):
        check_plan(tree)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: argument(t, "query_latent", "q_latent").update(size=[4096, 128]), "reaches byte"),
        (lambda t: argument(t, "query_latent", "q_latent").update(offset=1), "not aligned"),
        (lambda t: argument(t, "query_latent", "q_latent").update(offset=1 << 40), "reaches byte"),
        (lambda t: argument(t, "query_latent", "q_latent").update(stride=[1]), "size"),
        (lambda t: argument(t, "query_latent", "q_latent")["steps"].update(row=1 << 20), "reaches byte"),
        (lambda t: argument(t, "query_latent", "q_latent")["steps"].update(moon=1), "moves along|not aligned"),
        (lambda t: argument(t, "query_latent", "w.q_a").update(mutated=True), "weight and is changed"),
        (lambda t: argument(t, "query_latent", "w.q_a").update(buffer="w.none"), "not listed"),
        (lambda t: argument(t, "gather_index", "index_history")["steps"].update(place=1), "reaches byte"),
        (lambda t: argument(t, "index_select", "control.seen").update(size=[64]), "reaches byte"),
        (lambda t: step(t, "query_latent").update(writes=[]), "writes"),
        (lambda t: step(t, "query_latent")["passes"][0].update(program="none"), "calls 'none'"),
        (lambda t: step(t, "query_latent")["numbers"].update(tile=4096), "tiles larger"),
        (lambda t: step(t, "selection_barrier")["roles"].update(signals="none"), "'none' is used"),
        (lambda t: t["buffers"]["output"].update(offset=3), "unaligned"),
        (lambda t: t["buffers"]["output"].update(offset=1 << 40), "leaves"),
        (lambda t: t["buffers"]["output"]["planes"][0].update(shape=[1 << 20, 1 << 20]), "leaves buffer"),
        (lambda t: t["backing"].update(align=3), "aligned"),
        (lambda t: t["limits"].update(rows=129), "impossible"),
        (lambda t: t.update(outputs=[]), "no output"),
        (lambda t: t.update(outputs=["nothing"]), "not listed"),
        (lambda t: t["buffers"]["index_cache"].update(offset=0) or t["buffers"]["latent_cache"].update(offset=0), "share bytes"),
        (lambda t: t["steps"].pop(1), "before any step wrote it"),
    ],
)
def test_planted_fault_is_named(tree, change, message: str) -> None:
    change(tree)
    with pytest.raises(BadCore, match=message):
        check_plan(tree)


def test_lives_are_those_of_the_planner(small, tree) -> None:
    one = small.planned(ranks=2, rows=128)
    spans = lives(tree)
    for name in ("index_history", "latent_history", "query"):
        place = one.plan.by_name[name]
        assert [(place.begin - 1, place.end - 1)] == spans[name]


def test_this_machine_runs_its_own_core(small) -> None:
    check_machine(dict(small.ENVIRONMENT, cpu_flags=cpu_flags()[:4]))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"torch": "1.0.0"}, "torch 1.0.0"), ({"machine": "m68k"}, "machine m68k"), ({"cpu_flags": ["avx1024"]}, "avx1024")],
)
def test_foreign_machine_is_refused(small, change, message: str) -> None:
    with pytest.raises(WrongMachine, match=message):
        check_machine(copy.deepcopy(small.ENVIRONMENT) | change)
