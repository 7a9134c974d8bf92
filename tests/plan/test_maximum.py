"""Prepared sizes are the maximum over every legal shape, by looking at all of them; planted formulas that are not are found."""

import pytest
from plan_cases import K31, buffer, k31_program, program, step

from palimpsest.core.errors import PlanRefused
from palimpsest.core.geometry import Formats, Geometry, Indexer, Rope
from palimpsest.core.spec import Limits
from palimpsest.core.units import align_up
from palimpsest.plan.check import check
from palimpsest.plan.maximum import INT32, legal_maximum, prove_maximum, reaches, shapes
from palimpsest.plan.place import place
from palimpsest.recipes.blocks import layer_program

TINY = Geometry(
    "kimi_k31", "tiny", 64, 4, 4, 24, 128, 16, Rope("interleaved", 8), 16, 0.25, 1e-6, True,
    Indexer(2, 16, 8, "interleaved", 8, 1e-5), ("full", "shared", "linear", "full"), 4096,
)  # fmt: skip


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("formats", [Formats(), Formats("fp32", "fp8_ds_mla", "fp32", "fp32")])
def test_the_layer_prepares_the_maximum_of_all_small_shapes(layer, ranks, formats):
    limits = Limits(48, 40, ranks, 8)
    looked = prove_maximum(lambda shape: layer_program(TINY, shape, formats, layer), limits, least=8)
    assert looked == len(list(shapes(limits, 8))) == 8 + 16 + 24 + 32 + 40 + 40


def test_the_plan_is_the_brute_force_maximum():
    """Peak of the plan at the limits = the largest live sum over all shapes: nothing smaller needs more, nothing is wasted."""
    limits = Limits(64, 33, 2, 8)

    def build(shape):
        return layer_program(TINY, shape, Formats(), 0)

    plan = place(build(limits))
    check(build(limits), plan)
    most = legal_maximum(build, limits, least=8)
    assert plan.peak == most[""].nbytes
    assert {p.buffer: p.nbytes for p in plan.places} == {name: one.nbytes for name, one in most.items() if name}


def tiled(limits: Limits):
    """Pads a remainder of fewer than 4 rows to a whole tile of its own: 5 rows need more than 8."""
    rows = limits.rows if limits.rows % 4 == 0 else align_up(limits.rows, 4) + 4
    return program([buffer("tiles", 16 * rows)], [step("s0", writes="tiles")], limits=limits)


def test_a_smaller_shape_that_needs_more_is_found():
    with pytest.raises(PlanRefused, match=r"tiles of t: Limits\(tokens=8, rows=5.* needs 192 bytes.*prepares 128"):
        prove_maximum(tiled, Limits(64, 8, 1, 8))
    assert prove_maximum(tiled, Limits(64, 7, 1, 8)) == 7 * 8


def test_int32_offsets_are_those_of_the_plan():
    made = k31_program()
    widest = {r.buffer: r for r in reaches(made, place(made))}
    assert widest["latent_history"].byte == 603_979_775
    assert widest["latent_history"].element == 603_979_775
    assert all(r.fits_int32 for r in widest.values())
    large = layer_program(K31, Limits(1 << 22, 4096, 16), Formats(), 3)
    assert [r.buffer for r in reaches(large, place(large)) if not r.fits_int32]
    with pytest.raises(PlanRefused, match="32-bit"):
        check(large, place(large), index_bits=32)


def test_no_active_shape_forms_a_larger_offset():
    limits = Limits(32, 20, 2, 8)
    made = layer_program(TINY, limits, Formats(), 0)
    prepared = {r.buffer: r for r in reaches(made, place(made))}
    for shape in shapes(limits, 8):
        small = layer_program(TINY, shape, Formats(), 0)
        for name, one in prepared.items():
            assert small.by_name[name].nbytes - 1 <= one.byte <= INT32
