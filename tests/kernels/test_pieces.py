"""Hadamard, rotation, norms, fixed-tile projections and the probe that guards them."""

import math

import numpy as np
import pytest
import torch
from bare_ranks import aligned
from micro import FP8, geometry, program

from palimpsest.core.errors import Unavailable, UnknownName, Unsupported
from palimpsest.kernels import linear, sizes, table
from palimpsest.kernels.call import Scratch
from palimpsest.kernels.hadamard import Hadamard, butterflies
from palimpsest.kernels.linear import Projection, gemms, probe_row_invariance
from palimpsest.kernels.norms import RowNorm
from palimpsest.kernels.rope import Rotation
from palimpsest.kernels.sizes import ROW_TILE


@pytest.mark.parametrize("dim", [1, 2, 8, 128])
def test_hadamard_is_orthogonal_exactly(dim):
    """Whole numbers: H H x / dim is x, bit for bit, and H matches its definition."""
    x = torch.arange(3 * dim, dtype=torch.float64).view(3, dim) - dim
    work, half = x.clone(), torch.empty(3, max(1, dim // 2), dtype=torch.float64)
    butterflies(work, half)
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)], dtype=torch.float64)
    assert torch.equal(work, x @ matrix)
    butterflies(work, half)
    assert torch.equal(work / dim, x)


def test_hadamard_needs_a_power_of_two():
    with pytest.raises(Unsupported, match="power of two, not 24"):
        Hadamard(Scratch(aligned(1 << 16)), 24)


def test_hadamard_keeps_dot_products():
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(ROW_TILE, 128, generator=generator)
    before = tile.double() @ tile.double().T
    Hadamard(Scratch(aligned(sizes.hadamard_scratch(128))), 128)(tile)
    size = tile.double().norm(dim=1)
    bound = 4 * 2.0**-24 * size[:, None] * size[None]
    assert ((tile.double() @ tile.double().T - before).abs() <= bound).all()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_turns_pairs(layout):
    tile = torch.zeros(ROW_TILE, 4)
    tile[:, 0] = 1
    quarter = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(ROW_TILE, 1, 1)
    Rotation(Scratch(aligned(sizes.rotation_scratch(4))), 4, layout)(tile, quarter)
    other = 2 if layout == "half" else 1
    expected = torch.zeros(ROW_TILE, 4)
    expected[:, other] = 1
    assert torch.equal(tile, expected)


def test_unknown_rotation():
    with pytest.raises(UnknownName, match="RoPE layout 'neox'"):
        Rotation(Scratch(aligned(4096)), 4, "neox")(torch.zeros(1, 4), torch.zeros(1, 2, 2))


@pytest.mark.parametrize("bias", [False, True])
def test_norm_of_a_row_depends_on_that_row(bias):
    generator = torch.Generator().manual_seed(5)
    weight, shift = torch.randn(40, generator=generator), torch.randn(40, generator=generator) if bias else None
    tile = torch.randn(ROW_TILE, 40, generator=generator)
    norm = RowNorm(Scratch(aligned(sizes.norm_scratch(40))), weight, 1e-6, shift)
    whole = tile.clone()
    norm(whole)
    for row in (0, 7, 31):
        alone = torch.full((ROW_TILE, 40), math.nan)
        alone[31 - row] = tile[row]
        norm(alone)
        assert torch.equal(alone[31 - row], whole[row])


@pytest.mark.parametrize("columns", [1, 16, 256, 300, 520])
def test_projection_is_the_product_and_pads_with_zeros(columns):
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randint(-3, 4, (columns, 24), generator=generator).bfloat16()
    rows = torch.randint(-3, 4, (5, 24), generator=generator).bfloat16()
    expected = torch.zeros(ROW_TILE, columns)
    expected[:5] = rows.float() @ weight.float().T
    for resident in (False, True):
        scratch = Scratch(aligned(sizes.linear_scratch(24, columns, resident=resident), 0xFF))
        projection, out = Projection(scratch, 24, columns, resident=resident), torch.full((ROW_TILE, columns), math.nan)
        if resident:
            projection.load(weight)
            projection.apply(rows, out)
        else:
            projection.project(rows, weight, out)
        assert torch.equal(out, expected)


def test_gemm_shapes_are_the_blocks():
    assert gemms(24, 300) == [("fp32", ROW_TILE, 24, 44), ("fp32", ROW_TILE, 24, 256)]
    assert gemms(24, 512) == [("fp32", ROW_TILE, 24, 256)]


def test_engine_is_prepared_for_a_program():
    assert table.prepare_engine("portable", program(geometry(), FP8, 2)) >= 8
    assert table.prepare_engine("reference", program(geometry(), FP8, 2)) == 0


@pytest.mark.parametrize("fault", ["place", "neighbours"])
def test_the_probe_refuses_a_blas_that_moves_bits(monkeypatch, fault):
    honest = torch.mm

    def crooked(left, right, *, out=None):
        found = honest(left, right)
        if fault == "place":
            found[3] = torch.nextafter(found[3], torch.tensor(math.inf))
        else:
            found[0] += found.nansum() * 0 + left.isnan().sum()
        return found if out is None else out.copy_(found)

    monkeypatch.setattr(linear.torch, "mm", crooked)
    with pytest.raises(Unavailable, match=r"fp32 GEMM \[32,24\] x \[24,16\] fails"):
        probe_row_invariance([("fp32", 32, 24, 16)])


def test_scalar_division_is_ieee():
    """The quantiser divides by 448; a reciprocal would be off by an ulp for some inputs."""
    values = np.random.default_rng(0).random(4096, dtype=np.float32)
    exact = (values.astype(np.float64) / 448.0).astype(np.float32)
    assert np.array_equal(np.divide(values, np.float32(448.0)), exact)
