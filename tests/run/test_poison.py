"""Poison reaches every reusable byte and nothing else, each field gets its own pattern, an honest program does not notice it."""

import pytest
import torch

from palimpsest.core.errors import UnknownName
from palimpsest.plan.place import place
from palimpsest.run.arena import Arena
from palimpsest.run.guards import Canary
from palimpsest.run.poison import PATTERNS, poison


@pytest.fixture
def arena(toy):
    program = toy.program()
    made = Arena(program, place(program, "off"))  # apart, so that each history keeps its own pattern
    for kind in made.segments:
        made.segment(kind).fill_(0x55)
    yield made
    made.close()


def covered(arena) -> int:
    return len(set().union(*(range(p.offset, p.stop) for p in arena.plan.places if p.kind == "reusable")))


@pytest.mark.parametrize("pattern", ["Pn", "Ph", "Pl"])
def test_every_reusable_byte_and_nothing_else(arena, pattern: str) -> None:
    assert poison(arena, pattern, visible=1000) == covered(arena)
    mask = torch.zeros(arena.segments["reusable"].mapped, dtype=torch.bool)
    for spot in arena.plan.places:
        if spot.kind == "reusable":
            mask[spot.offset : spot.stop] = True
    untouched = arena.segment("reusable")[~mask]
    assert bool((untouched == 0x55).all())
    for kind in set(arena.segments) - {"reusable"}:
        assert bool((arena.segment(kind) == 0x55).all()), kind


def test_nan_pattern_by_field(arena) -> None:
    poison(arena, "Pn")
    assert bool(arena.view("index_history", "keys").float().isnan().all())
    assert bool(arena.view("index_history", "scales").isnan().all())
    spot = arena.plan.by_name["latent_history"]
    alone = torch.ones(spot.nbytes, dtype=torch.bool)
    for other in arena.plan.places:
        shares = other.kind == spot.kind and other.offset < spot.stop and spot.offset < other.stop
        if shares and other.buffer != "latent_history":
            alone[max(0, other.offset - spot.offset) : other.stop - spot.offset] = False
    assert int(alone.sum()) > spot.nbytes // 2
    assert bool((arena.raw("latent_history")[alone] == 0x7F).all())
    assert bool(arena.view("output").isnan().all())
    ids = arena.view("ids")
    assert int(ids.min()) >= 0x7F000000
    assert not bool((ids == -1).any())


def test_high_pattern_by_field(arena) -> None:
    signs = torch.zeros(128, dtype=torch.uint8)
    signs[::2] = 0x80
    poison(arena, "Ph", visible=500, signs=signs)
    keys = arena.view("index_history", "keys").float()
    assert bool((keys[:, ::2] == -448).all())
    assert bool((keys[:, 1::2] == 448).all())
    assert bool((arena.view("index_history", "scales") == 1024).all())
    assert bool(torch.isfinite(arena.view("output")).all())
    ids = arena.view("ids")
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 500


def test_low_stale_and_address_patterns(arena) -> None:
    poison(arena, "Pl")
    assert not arena.raw("latent_history").any()
    before = arena.segment("reusable").clone()
    assert poison(arena, "Ps") == 0
    assert torch.equal(arena.segment("reusable"), before)
    assert poison(arena, "Pa", seed=9) == arena.segments["reusable"].logical
    assert Canary(9).first_bad(arena.segment("reusable"), 0, arena.segments["reusable"].logical) is None
    with pytest.raises(UnknownName, match="Pn"):
        poison(arena, "Px")


def test_skipped_buffers_keep_their_bytes(arena) -> None:
    arena.view("output").fill_(4.0)
    poison(arena, "Pn", skip=["output"])
    assert bool((arena.view("output") == 4.0).all())


@pytest.mark.parametrize("reuse", ["on", "off"])
def test_an_honest_program_does_not_notice(toy, reuse: str) -> None:
    hidden = torch.randn(16, toy.WIDTH, generator=torch.Generator().manual_seed(1))

    def main(session):
        clean = session.prefill(hidden, 100, copy=True)
        for pattern in PATTERNS:
            poison(session.arena, pattern, visible=116)
            assert torch.equal(session.prefill(hidden, 100), clean), pattern
        return clean

    assert bool(torch.isfinite(toy.run(main, reuse=reuse)).all())


@pytest.mark.parametrize("pattern", ["Pn", "Ph", "Pl"])
def test_a_program_that_reads_what_it_did_not_write_is_exposed(toy, pattern: str) -> None:
    def attend(call, chunk):
        toy.toy_attend(call, chunk)
        stale = call.view("history")[min(chunk.visible, 1023), :32].view(torch.float32)  # one record past the visible ones
        call.view("output")[0].add_(stale)

    hidden = torch.randn(4, toy.WIDTH, generator=torch.Generator().manual_seed(1))

    def main(session):
        session.arena.segment("reusable").fill_(0x40)
        clean = session.prefill(hidden, 100, copy=True)
        poison(session.arena, pattern, visible=104)
        return torch.equal(session.prefill(hidden, 100).view(torch.uint8), clean.view(torch.uint8))

    assert toy.run(main, ops={"toy_attend": attend}) is False
