"""The planner's bars on the real models: at the lower bound, certified, the same every time, one address per role."""

import pytest

from palimpsest.core.spec import Limits
from palimpsest.plan.check import check
from palimpsest.plan.file import plan_tree
from palimpsest.plan.fold import role_of
from palimpsest.plan.place import place
from palimpsest.plan.verify import verify_tree
from palimpsest.recipes import default_formats, load_geometry, program
from palimpsest.recipes.model import model_program

MODELS = {"kimi-k3.1-pro": 1 << 20, "deepseek-v3.2": 131_072, "glm-5": 131_072, "glm-5.1": 131_072, "glm-5.2": 1 << 20}


@pytest.mark.parametrize("placers", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_layer_is_placed_at_its_lower_bound(name, placers):
    geometry = load_geometry(name)
    for ranks, rows in ((1, 512), (8, 4096), (16, 8192)):
        for layer in {geometry.full_layers[0], geometry.sparse_layers[-1]}:
            made = program(geometry, Limits(MODELS[name], rows, ranks), default_formats(geometry), layer)
            plan = place(made, placers=placers)
            check(made, plan)
            assert plan.peak == plan.lower_bound


@pytest.mark.parametrize(("rows", "ranks"), [(512, 8), (8192, 16)])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_whole_model_is_placed_within_one_percent_and_certified(name, rows, ranks):
    geometry = load_geometry(name)
    made = model_program(geometry, Limits(MODELS[name], rows, ranks), default_formats(geometry))
    plan = place(made, placers=False)
    check(made, plan)
    assert plan.ratio <= 1.01
    assert plan == place(made, placers=False)
    report = verify_tree(plan_tree(made, plan))
    assert report.ok, report.faults
    addresses: dict[str, set[int]] = {}
    for one in plan.places:
        if one.kind == "reusable" and one.buffer.startswith("layer"):
            addresses.setdefault(role_of(one.buffer), set()).add(one.offset)
    assert {len(found) for found in addresses.values()} == {1}


def test_both_arrangements_of_a_whole_model_differ_by_one_index_history():
    geometry = load_geometry("kimi-k3.1-pro")
    made = model_program(geometry, Limits(1 << 18, 4096, 8), default_formats(geometry))
    on, off = place(made, placers=False), place(made, "off", placers=False)
    check(made, off)
    assert off.peak - on.peak == 132 << 18
    report = verify_tree(plan_tree(made, off))
    assert report.ok, report.faults
