"""An explanation adds up with the bill, names the right order, and says so for programs with several lives and a whole model."""

import pytest

from palimpsest.core.spec import Buffer, Limits, Plane, Program, Step
from palimpsest.plan.account import account
from palimpsest.plan.explain import explain
from palimpsest.plan.place import place
from palimpsest.recipes import default_formats, load_geometry, program


def small(**sizes: int) -> tuple[Buffer, ...]:
    return tuple(Buffer(n, "reusable", (Plane("b", "u8", (s,), ("fixed",)),), f"{s}") for n, s in sizes.items())


def step(name: str, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), **more) -> Step:
    return Step(name, "op", "p0", tuple((r, r) for r in reads), tuple((w, w) for w in writes), **more)


@pytest.mark.parametrize("reuse", ["on", "off"])
@pytest.mark.parametrize("model", ["kimi-k3.1-pro", "glm-5.2", "deepseek-v3.2"])
def test_saved_bytes_add_up_with_the_bill(model: str, reuse: str) -> None:
    geometry = load_geometry(model)
    made = program(geometry, Limits(1 << 17, 4096, 8), default_formats(geometry), geometry.full_layers[0])
    plan = place(made, reuse)
    found, bill = explain(made, plan), account(made, plan)
    (total,) = (t for t in bill.totals if t.kind == "reusable")
    assert (found.slots, found.saved, found.idle, found.peak) == (total.slots, total.shared, total.idle, total.logical)
    assert found.peak_step == bill.peak_step
    assert {a.buffer for a in found.alive} <= set(bill.peak_live)
    assert all(r.chain for r in found.reuses)


def test_words_at_the_peak() -> None:
    steps = (
        step("one", writes=("kept",)),
        step("two", ("given",), ("made",), scratch=64),
        step("three", ("made", "kept"), ("result",)),
    )
    made = Program("toy", Limits(64, 1, 1), small(given=64, kept=128, made=256, result=64), steps, (), ("given",), ("result",))
    found = explain(made, place(made))
    assert found.peak_step == "two"
    why = {a.buffer: (a.role, a.why) for a in found.alive}
    assert why["given"] == ("read", "the caller fills it; read here for the last time")
    assert why["kept"] == ("hold", "one wrote it; not touched here, but three reads it last")
    assert why["made"] == ("write", "written here; three reads it last")
    assert why["two.scratch"] == ("write", "scratch of this step alone")
    assert found.runners_up[0].nbytes < found.lower_bound


def test_a_second_life_saves_nothing_more() -> None:
    steps = (step("a", writes=("x",)), step("b", ("x",)), step("c", writes=("y",)), step("d", ("y",)), step("e", writes=("x",)),
             step("f", ("x",)))  # fmt: skip
    made = Program("lives", Limits(64, 1, 1), small(x=128, y=128), steps)
    found = explain(made, place(made))
    assert (found.slots, found.saved, found.peak) == (256, 128, 128)
    assert [(r.early, r.late, r.chain) for r in found.reuses] == [("x", "y", ("b", "c"))]


def test_no_reuse_is_said_as_none() -> None:
    made = Program("one", Limits(64, 1, 1), small(x=64), (step("a", writes=("x",)), step("b", ("x",))))
    found = explain(made, place(made))
    assert (found.reuses, found.saved, found.peak) == ((), 0, 64)
