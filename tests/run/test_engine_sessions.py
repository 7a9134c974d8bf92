"""Compiled engines inside sealed sessions: nothing is allocated, poison never shows, watching changes nothing, ranks agree."""

import dataclasses

import pytest
import torch

from palimpsest.core.errors import RankError
from palimpsest.core.geometry import Formats
from palimpsest.core.spec import Limits
from palimpsest.kernels.detect import available_engines
from palimpsest.plan.place import place
from palimpsest.ranks.local import run_local
from palimpsest.recipes.blocks import layer_program
from palimpsest.recipes.rope import tables
from palimpsest.run.execute import prepare
from palimpsest.run.weights import synthetic

ENGINES = list(available_engines())


class Watch:
    """Hooks that count what they are shown."""

    def __init__(self):
        self.scores = self.selected = 0

    def before(self, step, call, chunk):
        pass

    def after(self, step, call, chunk):
        pass

    def tap(self, step, event, **data):
        self.scores += event == "scores"
        self.selected += event == "selected"


def sessions(micro, engine, main, *, ranks=1, threads=1, reuse="on", planned=None):
    made = dataclasses.replace(micro.geometry(), nope=32)
    program = layer_program(made, Limits(128, 64, ranks, 16), Formats(), 0, engine=planned or engine, threads=threads)
    plan = place(program, reuse)

    def rank(comm):
        with prepare(program, plan, comm=comm, fill=synthetic(1, tables(made)), engine=engine) as session:
            return main(session)

    return run_local(ranks, rank)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_guarded_session_allocates_nothing_and_keeps_its_bits(micro, engine):
    whole = micro.whole
    (base,) = sessions(micro, engine, whole)
    assert base.isfinite().all()
    (guarded,) = sessions(micro, engine, lambda s: whole(s, (64, 64), guard=True), threads=2)
    assert torch.equal(base, guarded)
    for found in sessions(micro, engine, lambda s: whole(s, (50, 64, 14)), ranks=2, reuse="off"):
        assert torch.equal(base, found)


@pytest.mark.parametrize("engine", ENGINES)
def test_watching_changes_nothing(micro, engine):
    hooks, whole = Watch(), micro.whole
    (base,), (seen,) = sessions(micro, engine, whole), sessions(micro, engine, lambda s: whole(s, hooks=hooks), threads=2)
    assert torch.equal(base, seen)
    assert hooks.scores == 128
    assert hooks.selected == 128 // 16


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "portable"])
def test_a_plan_of_another_engine_is_refused(micro, engine):
    with pytest.raises(RankError, match=f"planned for engine {engine} and would run on portable"):
        sessions(micro, "portable", micro.whole, planned=engine)
