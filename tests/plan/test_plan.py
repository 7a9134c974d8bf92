"""The plan value: digest, text, and a JSON reader that takes nothing but the exact form."""

import json

import pytest
from plan_cases import buffer, k31_program, program, step

from palimpsest.core.errors import BadConfig, UserError
from palimpsest.plan.place import place
from palimpsest.plan.plan import LARGEST, Plan


@pytest.fixture(scope="module")
def plan():
    buffers = [buffer("a", 10), buffer("b", 20), buffer("w", 5, kind="weights")]
    steps = [step("s0", writes="a", reads="w"), step("s1", reads="a"), step("s2", writes="b")]
    return place(program(buffers, steps, outputs=("b",)))


def test_json_round_trip_keeps_every_field_and_the_digest(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    assert again.to_json() == plan.to_json()


def test_properties(plan):
    assert plan.peak == plan.by_kind["reusable"].nbytes == plan.lower_bound == 32
    assert plan.ratio == 1.0
    assert plan.by_name["b"].stop == 20
    assert plan.total == 32 + 5
    assert "b: 20 B, s2 .. end" in plan.text()
    assert plan.digest in plan.text()


def test_any_change_changes_the_digest(plan):
    tree = json.loads(plan.to_json())
    tree["places"][0]["offset"] = 16
    assert Plan.from_json(json.dumps(tree)).digest != plan.digest


def edits():
    def put(path, value):
        def edit(tree):
            at = tree
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value

        return edit

    def drop(path):
        def edit(tree):
            at = tree
            for key in path[:-1]:
                at = at[key]
            del at[path[-1]]

        return edit

    return {
        "unknown field": put(["extra"], 1),
        "unknown inner field": put(["places", 0, "extra"], 1),
        "missing field": drop(["placer"]),
        "missing inner field": drop(["segments", 0, "nbytes"]),
        "wrong format": put(["format"], "palimpsest-plan-0"),
        "negative": put(["places", 0, "offset"], -1),
        "huge": put(["places", 0, "offset"], LARGEST + 1),
        "bool as number": put(["lower_bound"], True),
        "float": put(["lower_bound"], 1.5),
        "text as number": put(["places", 0, "nbytes"], "10"),
        "number as text": put(["program"], 3),
        "null": put(["program_digest"], None),
        "list for object": put(["limits"], []),
        "object for list": put(["places"], {}),
        "entry not an object": put(["handovers"], [3]),
        "chain of a number": put(["handovers"], [{"early": "a", "late": "b", "start": 0, "stop": 1, "chains": [[1]]}]),
        "chains not lists": put(["handovers"], [{"early": "a", "late": "b", "start": 0, "stop": 1, "chains": "s"}]),
        "unknown kind": put(["places", 0, "kind"], "stack"),
        "reuse neither": put(["reuse"], "maybe"),
        "zero tokens": put(["limits", "tokens"], 0),
        "long text": put(["placer"], "x" * 2000),
    }


@pytest.mark.parametrize("name", list(edits()))
def test_the_reader_refuses(plan, name):
    tree = json.loads(plan.to_json())
    edits()[name](tree)
    with pytest.raises(UserError):
        Plan.from_json(json.dumps(tree))


@pytest.mark.parametrize(
    "text", ["", "[]", "nul", "[" * 200_000, '{"a":1,"a":2}', '{"a":NaN}', '{"a":' + "9" * 5000 + "}", '"x"']
)
def test_the_reader_refuses_text_that_is_no_plan(text):
    with pytest.raises(BadConfig):
        Plan.from_json(text)


def test_a_repeated_field_is_refused(plan):
    text = plan.to_json().replace('"placer":', '"placer":"other","placer":', 1)
    with pytest.raises(BadConfig, match="names a field twice"):
        Plan.from_json(text)


def test_a_real_plan_survives_the_trip():
    plan = place(k31_program())
    assert Plan.from_json(plan.to_json()) == plan
