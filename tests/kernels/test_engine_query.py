"""index_query of the amx engine: its compiled records have the bits of the shared pieces, whatever is in a row."""

import numpy as np
import pytest
import torch
from bare_ranks import aligned
from engines import COMPILED

from palimpsest.kernels.call import Scratch
from palimpsest.kernels.detect import available_engines
from palimpsest.kernels.fp8 import Quantiser
from palimpsest.kernels.hadamard import Hadamard
from palimpsest.kernels.rope import Rotation
from palimpsest.kernels.sizes import ROW_TILE

AMX = [name for name in COMPILED if name == "amx"]
LAYOUTS = {"none": 0, "half": 1, "interleaved": 2}


def rows(dim: int) -> torch.Tensor:
    """[ROW_TILE, dim] fp32: ordinary rows, and some with subnormals, halves between codes, zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(dim)
    found = torch.randn(ROW_TILE, dim, generator=generator) * torch.logspace(-6, 6, ROW_TILE)[:, None]
    found[1] = 0.0
    found[2] = -0.0
    found[3] = torch.linspace(-448, 448, dim)
    found[4] = (torch.arange(dim) - dim // 2) * 2.0**-10
    found[4, 0] = 448.0
    found[5, 3], found[6, 4], found[7, 5] = torch.inf, -torch.inf, torch.nan
    found[8] = 1e-30
    return found


@pytest.mark.parametrize("engine", AMX)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dim", [8, 128])
def test_records_have_the_bits_of_the_pieces(engine, layout, hadamard, power_of_two, dim):
    assert engine in available_engines()
    from palimpsest.kernels.index_query.amx_kernel import Record, form_records

    dims, tile = dim // 2, rows(dim)
    angle = torch.randn(ROW_TILE, dims // 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 50
    table = torch.stack([angle.cos(), angle.sin()], 2).float()
    queries, weights = tile.clone().view(ROW_TILE, 1, dim), torch.linspace(-2, 2, ROW_TILE).view(-1, 1)
    codes, scaled = np.zeros((ROW_TILE, 1, dim), np.uint8), weights.clone().numpy()
    record = Record(LAYOUTS[layout], dims, hadamard, power_of_two, np.zeros(2 * dim, np.float32), np.zeros(dim))
    with np.errstate(all="ignore"):
        form_records(record, queries.numpy(), table.numpy(), codes, scaled)
        scratch = Scratch(aligned(1 << 20))
        Rotation(scratch, dims, layout)(tile[:, :dims], table)
        if hadamard:
            Hadamard(scratch, dim)(tile)
        quantise = Quantiser(scratch, dim, dim, power_of_two=power_of_two)
        quantise(tile)
    expected = quantise.codes.view(torch.uint8).numpy()
    nan = (expected & 0x7F) == 0x7F
    assert np.array_equal((codes[:, 0] & 0x7F) == 0x7F, nan)
    assert np.array_equal(np.where(nan, 0, codes[:, 0]), np.where(nan, 0, expected))
    expected_weights = (weights * quantise.scales).numpy()
    assert np.array_equal(scaled.view(np.int32), expected_weights.view(np.int32))


@pytest.mark.parametrize("engine", AMX)
def test_every_fp32_near_every_code_rounds_as_torch_does(engine):
    """Values around each e4m3 code and each midpoint, one ulp to either side; a scale of one."""
    assert engine in available_engines()
    from palimpsest.kernels.index_query.amx_kernel import Record, form_records

    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2]).float()
    values = torch.cat([points, torch.nextafter(points, torch.tensor(1e9)), torch.nextafter(points, torch.tensor(-1e9))])
    values = torch.cat([values, -values]).clamp(-448, 448)
    padded = torch.cat([values, torch.full((-len(values) % 127,), 1.0)]).view(-1, 127)
    line = torch.cat([padded, torch.full((len(padded), 1), 448.0)], 1).contiguous()
    found, weights = np.zeros((len(line), 1, 128), np.uint8), np.ones((len(line), 1), np.float32)
    record = Record(0, 0, False, False, np.zeros(256, np.float32), np.zeros(128))
    form_records(record, line.clone().view(len(line), 1, 128).numpy(), np.zeros((0, 1, 2), np.float32), found, weights)
    assert (weights == 1).all()
    assert np.array_equal(found[:, 0], line.to(torch.float8_e4m3fn).view(torch.uint8).numpy())
