"""e4m3 and its scales against exact rational arithmetic."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from bare_ranks import aligned

from palimpsest.kernels.call import Scratch
from palimpsest.kernels.fp8 import Decoder, Quantiser, round_up_to_power_of_two
from palimpsest.kernels.sizes import ROW_TILE, decode_scratch, quantise_scratch


def value(code: int) -> Fraction | None:
    """OCP e4m3 fn: exponent bias 7; only S.1111.111 is NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    size = (
        Fraction(mantissa, 8) * Fraction(2) ** -6
        if exponent == 0
        else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )
    return -size if code & 128 else size


def nearest(x: Fraction) -> int:
    """Code of the nearest magnitude, ties to even, saturating; sign separate."""
    size = min(abs(x), Fraction(448))
    best = min(range(127), key=lambda c: (abs(value(c) - size), c & 1))
    return best | (128 if x < 0 else 0)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_all_256_codes_decode_exactly(dtype):
    decode = Decoder(Scratch(aligned(decode_scratch(256), 0xFF)), 256, dtype)
    out = torch.empty(16, 16, dtype=torch.float32 if dtype == "fp32" else torch.float64)
    decode(torch.arange(256, dtype=torch.uint8).view(16, 16), out)
    for code, found in enumerate(out.view(-1).tolist()):
        expected = value(code)
        assert math.isnan(found) if expected is None else Fraction(found) == expected, hex(code)
    assert math.copysign(1, out.view(-1)[128].item()) == -1


def test_a_table_scale_is_rounded_once():
    decode = Decoder(Scratch(aligned(decode_scratch(256))), 256, "fp32", 0.1)
    out = torch.empty(256)
    decode(torch.arange(256, dtype=torch.uint8), out)
    for code in range(127):
        assert out[code].item() == np.float32(float(value(code)) * 0.1)


def quantiser(width, block, power_of_two):
    return Quantiser(Scratch(aligned(quantise_scratch(width, block), 0xFF)), width, block, power_of_two=power_of_two)


def hard_rows() -> torch.Tensor:
    """Every code, every midpoint of neighbours and their fp32 neighbours, with 448 in each row so that the scale is exactly 1."""
    points = [float(value(c)) for c in range(127)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(points)]
    values = np.array(points + middles, dtype=np.float32)
    values = np.concatenate([values, np.nextafter(values, np.float32(1e9)), np.nextafter(values, np.float32(-1e9))])
    values = values[np.abs(values) <= 448]
    rows = np.zeros((ROW_TILE, 31), dtype=np.float32)
    rows.reshape(-1)[: len(values)] = values
    rows[1::2] *= -1
    return torch.from_numpy(np.concatenate([rows, np.full((ROW_TILE, 1), 448, dtype=np.float32)], 1))


@pytest.mark.parametrize("power_of_two", [True, False])
def test_quantise_rounds_to_nearest_even(power_of_two):
    tile = hard_rows()
    quantise = quantiser(32, 32, power_of_two)
    quantise(tile)
    assert torch.equal(quantise.scales, torch.ones(ROW_TILE, 1))
    for x, code in zip(tile.view(-1).tolist(), quantise.codes.view(torch.uint8).view(-1).tolist(), strict=True):
        assert code & 127 == nearest(Fraction(x)) & 127, (x, hex(code))
        assert (code >> 7 == 1) == (math.copysign(1, x) < 0), (x, hex(code))


def test_every_e4m3_value_survives_a_round_trip():
    tile = torch.zeros(ROW_TILE, 256)
    codes = torch.arange(256, dtype=torch.uint8)
    tile[0] = codes.view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    quantise = quantiser(256, 256, True)
    quantise(tile)
    found = quantise.codes[0].view(torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    assert torch.equal(found[finite], codes[finite])


@pytest.mark.parametrize("power_of_two", [True, False])
def test_scales_against_rational_arithmetic(power_of_two):
    generator = torch.Generator().manual_seed(3)
    tile = torch.randn(ROW_TILE, 24, generator=generator) * torch.exp2(torch.randint(-30, 30, (ROW_TILE, 1), generator=generator))
    tile[0] = 0
    tile[1] = 1e-5
    quantise = quantiser(24, 8, power_of_two)
    quantise(tile)
    for row in range(ROW_TILE):
        for block in range(3):
            part = tile[row, block * 8 : block * 8 + 8]
            amax = max(np.float32(part.abs().max().item()), np.float32(1e-4))
            scale = np.float32(amax) / np.float32(448)
            if power_of_two:
                exact, power = Fraction(float(scale)), Fraction(1)
                while power < exact:
                    power *= 2
                while power / 2 >= exact:
                    power /= 2
                scale = float(power)
            assert quantise.scales[row, block].item() == float(scale)
            divided = (part.numpy() / np.float32(scale)).tolist()
            codes = quantise.codes[row, block * 8 : block * 8 + 8].view(torch.uint8).tolist()
            assert [c & 127 for c in codes] == [nearest(Fraction(x)) & 127 for x in divided]


def test_powers_of_two_round_up_exactly():
    powers = np.array([2.0**e for e in range(-126, 128)], dtype=np.float32)
    bits = np.empty(len(powers), dtype=np.int32)
    for values, expected in (
        (powers, powers),
        (np.nextafter(powers, np.float32(0))[1:], powers[1:]),
        (np.nextafter(powers, np.float32(np.inf))[:-1], powers[1:]),
    ):
        found = values.copy()
        round_up_to_power_of_two(found, bits[: len(found)])
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_element_is_visible(bad, power_of_two):
    tile = torch.ones(ROW_TILE, 8)
    tile[2, 5] = bad
    quantise = quantiser(8, 8, power_of_two)
    with np.errstate(all="raise"):
        quantise(tile)
    codes = quantise.codes.view(torch.uint8)
    assert quantise.scales[2, 0].item() == math.inf
    assert codes[2, 5].item() & 0x7F == 0x7F
    assert torch.equal(codes[1], codes[3])
    assert (codes[3] & 0x7F != 0x7F).all()
