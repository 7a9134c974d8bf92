"""Exact scores: the decoder, the verified facts, the filter and its error, the cutoff."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.prove.exact import (
    E4M3_UNITS,
    E4M3_VALUES,
    Exact,
    IndexRow,
    aligned,
    decode_bf16,
    decode_fp32,
    decode_keys,
    exact_cutoff,
    exact_score,
    filtered_scores,
    nan_codes,
    refiner,
)

torch = pytest.importorskip("torch")


def codes(rng, *shape):
    """Random e4m3 codes, no NaN, all magnitudes."""
    drawn = rng.integers(0, 256, shape, np.uint8)
    return np.where(drawn & 0x7F == 0x7F, drawn & 0x80 | 0x7E, drawn).astype(np.uint8)


def fraction_score(row, key, scale):
    total = Fraction(0)
    for w, q in zip(row.weights.tolist(), row.query.tolist(), strict=True):
        dot = sum((Fraction(a) * Fraction(b) for a, b in zip(q, key.tolist(), strict=True)), Fraction(0))
        total += Fraction(w) * max(dot, Fraction(0))
    return total * Fraction(float(scale))


def number(exact):
    return Fraction(exact.mantissa) * Fraction(2) ** exact.exponent


def test_all_256_codes_match_torch_bit_for_bit():
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64).numpy()
    assert np.array_equal(np.isnan(theirs), np.isnan(E4M3_VALUES))
    finite = ~np.isnan(theirs)
    assert np.array_equal(theirs[finite].view(np.uint64), E4M3_VALUES[finite].view(np.uint64))
    assert np.array_equal(E4M3_UNITS[finite], (theirs[finite] * 512).astype(np.int64))
    assert np.abs(E4M3_UNITS).max() == 229376
    assert nan_codes(np.arange(256, dtype=np.uint8)) == 2


def test_bf16_and_fp32_decoders_match_torch():
    raw = np.random.default_rng(0).integers(0, 256, (4, 64), np.uint8)
    raw[:, 1::2] &= 0x7E
    for decode, kind in ((decode_bf16, torch.bfloat16), (decode_fp32, torch.float32)):
        theirs = torch.from_numpy(raw).view(kind).to(torch.float64).numpy()
        assert np.array_equal(decode(raw), theirs, equal_nan=True)


@pytest.mark.parametrize("depth", [128, 576])
def test_fp64_gemm_of_e4m3_is_exact_in_any_order(depth):
    rng = np.random.default_rng(depth)
    q, k = codes(rng, 16, depth), codes(rng, 256, depth)
    q[0], k[0] = 0x7E, 0x7E
    q[1], k[1] = np.where(np.arange(depth) % 2, 0x7E, 0x01), np.where(np.arange(depth) % 2, 0xFE, 0x01)
    whole = E4M3_UNITS[q] @ E4M3_UNITS[k].T
    shuffle = rng.permutation(depth)
    for order in (np.arange(depth), np.arange(depth)[::-1], shuffle):
        dots = E4M3_VALUES[q][:, order] @ E4M3_VALUES[k][:, order].T
        assert np.array_equal(dots * 2.0**18, whole.astype(np.float64))
    narrow = (E4M3_VALUES[q].astype(np.float32) @ E4M3_VALUES[k].astype(np.float32).T).astype(np.float64)
    assert not np.array_equal(narrow * 2.0**18, whole.astype(np.float64)), "fp32 sums must round here, or the fact is vacuous"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["fp8", "fp32"]))
def test_integers_equal_fractions_and_the_filter_encloses_them(seed, format):
    rng = np.random.default_rng(seed)
    heads, dim, n = int(rng.integers(1, 5)), int(rng.integers(1, 20)), 6
    if format == "fp8":
        row = IndexRow.from_bytes(codes(rng, heads, dim), rng.standard_normal(heads).astype(np.float32), "fp8")
        keys, scales = decode_keys(codes(rng, n, dim), "fp8"), np.exp2(rng.uniform(-20, 4, n)).astype(np.float32)
    else:
        query = rng.standard_normal((heads, dim), np.float32)
        row = IndexRow.from_bytes(query.view(np.uint8), rng.standard_normal(heads).astype(np.float32), "fp32")
        keys, scales = rng.standard_normal((n, dim), np.float32).astype(np.float64), None
    near = filtered_scores(row, keys, scales)
    for i in range(n):
        scale = np.float32(1) if scales is None else scales[i]
        score = exact_score(row, keys[i], float(scale))
        assert number(score) == fraction_score(row, keys[i], scale)
        assert abs(number(score) - Fraction(float(near.value[i]))) <= Fraction(float(near.error[i]))


def test_filter_is_exact_on_lattice_data_and_not_on_natural_data():
    rng = np.random.default_rng(3)
    lattice = np.array([0, 0x38, 0xB8], np.uint8)[rng.integers(0, 3, (64, 128))]
    row = IndexRow.from_bytes(lattice[:8], np.array([1, -2, 2, -1, 1, 1, 2, -2], np.float32), "fp8")
    near = filtered_scores(row, decode_keys(lattice, "fp8"), np.ones(64, np.float32))
    assert not near.error.any()
    assert np.array_equal(near.value, near.value.astype(np.float32))
    row = IndexRow.from_bytes(codes(rng, 8, 128), rng.standard_normal(8).astype(np.float32), "fp8")
    assert filtered_scores(row, decode_keys(codes(rng, 64, 128), "fp8"), np.ones(64, np.float32)).error.any()


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(-300, 300)), min_size=2, max_size=6))
def test_exact_order_and_equality_are_those_of_rationals(parts):
    scores = [Exact.of(m, e) for m, e in parts]
    values = [Fraction(m) * Fraction(2) ** e for m, e in parts]
    for (a, x), (b, y) in itertools.product(zip(scores, values, strict=True), repeat=2):
        assert (a < b) == (x < y)
        assert (a == b) == (x == y)
    order = aligned(scores)
    assert sorted(range(len(order)), key=lambda i: order[i]) == sorted(range(len(values)), key=lambda i: values[i])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_exactly_itself(value):
    assert number(Exact.from_float(value)) == Fraction(value)
    assert float(Exact.from_float(value)) == value


def test_minus_zero_is_zero():
    assert Exact.from_float(-0.0) == Exact.from_float(0.0) == Exact(0, 0)


def _reader(values, scales):
    return lambda ids: (values[ids], scales[ids])


def test_cutoff_settles_with_integers_what_fp64_cannot_see():
    """Scores that differ by less than an fp64 ulp: the filter leaves them open and integers order them."""
    # weights 1 and 2**-60: the second head changes the score far below fp64's last bit
    row = IndexRow.from_bytes(np.array([[0x38, 0], [0, 0x38]], np.uint8), np.array([1, 2.0**-60], np.float32), "fp8")
    values = np.array([[0x38, 0x38], [0x38, 0x40], [0x38, 0x38], [0x38, 0], [0x30, 0x38]], np.uint8)
    scales = np.ones(5, np.float32)
    near = filtered_scores(row, decode_keys(values, "fp8"), scales)
    assert len(set(near.value[:4].tolist())) == 1
    cut = exact_cutoff(near.value, near.error, 2, refiner(row, _reader(values, scales)))
    assert cut.above.tolist() == [1]
    assert cut.equal.tolist() == [0, 2]
    assert cut.needed == 1
    assert cut.tied
    assert cut.undecided == 4


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(1, 40))
def test_cutoff_equals_brute_force(seed, lattice, m):
    rng = np.random.default_rng(seed)
    pick = (lambda *s: np.array([0, 0x38, 0xB8], np.uint8)[rng.integers(0, 3, s)]) if lattice else (lambda *s: codes(rng, *s))
    weights = rng.choice([-2, -1, 1, 2], 3).astype(np.float32) if lattice else rng.standard_normal(3).astype(np.float32)
    row = IndexRow.from_bytes(pick(3, 16), weights, "fp8")
    values, scales = pick(40, 16), np.ones(40, np.float32)
    values[7], values[30] = values[3], values[3]
    near = filtered_scores(row, decode_keys(values, "fp8"), scales)
    cut = exact_cutoff(near.value, near.error, m, refiner(row, _reader(values, scales)))
    truth = [fraction_score(row, key, 1) for key in decode_keys(values, "fp8")]
    tau = sorted(truth, reverse=True)[m - 1]
    assert number(cut.tau) == tau
    assert cut.above.tolist() == [i for i, s in enumerate(truth) if s > tau]
    assert cut.equal.tolist() == [i for i, s in enumerate(truth) if s == tau]


def test_cutoff_refuses_scores_that_are_not_numbers():
    with pytest.raises(ValueError, match="1 of 3 scores are not finite"):
        exact_cutoff(np.array([1, np.nan, 2]), np.zeros(3), 1, lambda ids: [])
    with pytest.raises(ValueError, match="m = 4"):
        exact_cutoff(np.zeros(3), np.zeros(3), 4, lambda ids: [])
    assert exact_cutoff(np.zeros(0), np.zeros(0), 0, lambda ids: []).tau is None
