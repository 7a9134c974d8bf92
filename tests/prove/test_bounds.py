"""Derived bounds: never exceeded by the arithmetic they describe, and not vacuous."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.prove.bounds import (
    ORACLE_64,
    PORTABLE_1,
    U32,
    U64,
    U_BF16,
    Softmax,
    adds_blocks_once,
    compound,
    context_bound,
    exp_error,
    lse_bound,
    own_bound,
    probability_error,
    score_error,
    score_error_exact,
)
from palimpsest.prove.exact import IndexRow, decode_keys, exact_score, filtered_scores

SEEDS = st.integers(0, 2**32 - 1)


def number(exact):
    return Fraction(exact.mantissa) * Fraction(2) ** exact.exponent


def codes(rng, *shape):
    drawn = rng.integers(0, 256, shape, np.uint8)
    return np.where(drawn & 0x7F == 0x7F, drawn ^ 1, drawn).astype(np.uint8)


def softmax_of(query, keys, scale, kv_lora, dequant_u=0.0):
    """The fp64 Softmax of one head."""
    s = scale * (keys @ query)
    values = keys[:, :kv_lora]
    return Softmax.of(s, scale * (np.abs(keys) @ np.abs(query)), values, dim=len(query), dequant_u=dequant_u)


def test_compound_is_the_product():
    for count, u in ((1, U32), (96, U32), (2048, U32), (575, U64)):
        exact = (1 + Fraction(u)) ** count - 1
        assert abs(Fraction(compound(count, u)) - exact) <= exact * Fraction(1, 1 << 50)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(["fp8", "fp32"]))
def test_deployed_scores_stay_within_their_error(seed, format):
    """The canonical score (fp64, one rounding) against integers; and an fp32 any-order engine against its own model."""
    rng = np.random.default_rng(seed)
    heads, dim = int(rng.integers(1, 9)), int(rng.integers(2, 40))
    if format == "fp8":
        row = IndexRow.from_bytes(codes(rng, heads, dim), rng.standard_normal(heads).astype(np.float32), "fp8")
        keys, scales = decode_keys(codes(rng, 8, dim), "fp8"), np.exp2(rng.uniform(-12, 2, 8)).astype(np.float32)
    else:
        query = rng.standard_normal((heads, dim), np.float32)
        row = IndexRow.from_bytes(query.view(np.uint8), rng.standard_normal(heads).astype(np.float32), "fp32")
        keys, scales = rng.standard_normal((8, dim), np.float32).astype(np.float64), None
    near = filtered_scores(row, keys, scales)
    sigma = np.ones(8, np.float32) if scales is None else scales
    truth = [number(exact_score(row, k, float(s))) for k, s in zip(keys, sigma, strict=True)]
    stored = near.value.astype(np.float32)
    allowed = score_error(PORTABLE_1, value=near.value, mass=near.mass, spread=near.spread, heads=heads, dim=dim)
    for got, want, error, rough in zip(stored, truth, allowed, near.error, strict=True):
        assert abs(Fraction(float(got)) - want) <= Fraction(float(error)) + Fraction(float(rough))
    narrow = dataclasses.replace(PORTABLE_1, name="fp32", index_dot_u=U32, head_u=U32)
    spread = np.abs(row.weights.astype(np.float64)) @ (np.abs(row.query) @ np.abs(keys).T) * sigma
    dots = np.maximum(row.query.astype(np.float32) @ keys.astype(np.float32).T, 0)
    single = (row.weights @ dots) * sigma
    allowed = score_error(narrow, value=near.value, mass=near.mass, spread=spread, heads=heads, dim=dim) + near.error
    assert all(abs(Fraction(float(g)) - w) <= Fraction(float(e)) for g, w, e in zip(single, truth, allowed, strict=True))


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_the_rational_error_is_the_same_formula(seed):
    rng = np.random.default_rng(seed)
    value, mass, spread = (abs(rng.standard_normal()) * s for s in (1, 3, 9))
    for exact_dots in (True, False):
        exact = score_error_exact(
            PORTABLE_1,
            value=Fraction(value),
            mass=Fraction(mass),
            spread=Fraction(spread),
            heads=64,
            dim=128,
            exact_dots=exact_dots,
        )
        rough = score_error(
            PORTABLE_1,
            value=np.array([value]),
            mass=np.array([mass]),
            spread=None if exact_dots else np.array([spread]),
            heads=64,
            dim=128,
        )
        assert exact <= Fraction(float(rough[0]))
        assert Fraction(float(rough[0])) <= exact * (1 + Fraction(1, 1 << 40))


def test_exact_dots_need_a_wide_accumulator():
    narrow = dataclasses.replace(PORTABLE_1, index_dot_u=U32)
    with pytest.raises(AssertionError, match="pass the spread"):
        score_error(narrow, value=np.zeros(1), mass=np.zeros(1), spread=None, heads=1, dim=1)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 300), st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]), st.sampled_from([1.0, 0.3]))
def test_context_bound_is_never_exceeded(portable_context, seed, n, temperature, record_scale):
    rng = np.random.default_rng(seed)
    dim, lora = 48, 32
    keys = rng.standard_normal((n, dim)).astype(np.float32).astype(np.float64) * record_scale
    query = rng.standard_normal((2, dim)).astype(np.float32).astype(np.float64)
    scale = temperature * dim**-0.5
    dequant = 0.0 if record_scale == 1 else U32
    got = portable_context(query, keys, scale, lora).astype(np.float64)
    for head in range(2):
        exact = softmax_of(query[head], keys, scale, lora, dequant)
        own = own_bound(exact)
        bound = context_bound(PORTABLE_1, exact, own) + own
        assert (own < bound).all()
        assert (np.abs(got[head] - exact.context) <= bound).all()


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 200), st.sampled_from([0.1, 1.0, 4.0]))
def test_an_online_bf16_engine_stays_within_its_own_model(seed, n, temperature):
    """Running maxima, rescaling and bf16 probabilities: the general formula, not only the portable case of it."""
    model = dataclasses.replace(
        PORTABLE_1, name="online-bf16", logit_dot_u=U32, p_u=U_BF16, online=True, sum_rounded_p=False, block=16, out_u=U_BF16
    )
    rng = np.random.default_rng(seed)
    dim, lora = 32, 16
    keys = rng.standard_normal((n, dim)).astype(np.float32)
    query = rng.standard_normal(dim).astype(np.float32)
    scale = np.float32(temperature * dim**-0.5)

    def bf16(x):
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)

    top, total, acc = np.float32(-np.inf), np.float32(0), np.zeros(lora, np.float32)
    for start in range(0, n, 16):
        s = (keys[start : start + 16] @ query) * scale
        new = max(top, s.max())
        shrink = np.float32(np.exp(np.float64(top - new))) if start else np.float32(0)
        p = np.exp((s - new).astype(np.float64)).astype(np.float32)
        total = np.float32(total * shrink + p.sum(dtype=np.float32))
        acc = acc * shrink + bf16(p) @ keys[start : start + 16, :lora]
        top = new
    got = bf16(acc / total).astype(np.float64)
    exact = softmax_of(query.astype(np.float64), keys.astype(np.float64), float(scale), lora)
    own = own_bound(exact)
    assert (np.abs(got - exact.context) <= context_bound(model, exact, own) + own).all()


def test_the_bound_has_power():
    """At the real size every single-record substitution moves some coordinate by more than two bounds; with bf16 few do."""
    rng = np.random.default_rng(5)
    n, dim, lora = 2048, 576, 512
    keys = rng.standard_normal((n + 64, dim))
    query = rng.standard_normal(dim)
    exact = softmax_of(query, keys[:n], dim**-0.5, lora)
    shares = {}
    for name, model in (("fp32", PORTABLE_1), ("bf16", dataclasses.replace(PORTABLE_1, p_u=U_BF16, out_u=U_BF16))):
        bound = context_bound(model, exact)
        caught = 0
        for other in range(64):
            changed = keys[:n].copy()
            changed[other * 31] = keys[n + other]
            moved = softmax_of(query, changed, dim**-0.5, lora)
            caught += bool((np.abs(moved.context - exact.context) > 2 * bound).any())
        shares[name] = caught
    assert shares["fp32"] == 64
    assert shares["bf16"] < 16


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 200), st.sampled_from([0.1, 1.0, 8.0]))
def test_lse_bound_holds(seed, n, temperature):
    rng = np.random.default_rng(seed)
    keys, query = rng.standard_normal((n, 16)), rng.standard_normal(16)
    exact = softmax_of(query, keys, temperature / 4, 8)
    lse = float(np.logaddexp.reduce(exact.logits))
    s = exact.logits.astype(np.float32)
    p = np.exp((s - s.max()).astype(np.float64)).astype(np.float32)
    total = np.float32(0)
    for start in range(0, n, 64):
        total += p[start : start + 64].sum(dtype=np.float32)
    got = np.float32(np.log(np.float64(total))) + s.max()
    assert abs(float(got) - lse) <= lse_bound(PORTABLE_1, exact, lse)


def test_nothing_is_known_when_the_probabilities_are_lost():
    exact = softmax_of(np.ones(4) * 2.0**16, np.eye(4) * 2.0**16, 1.0, 2)
    assert probability_error(PORTABLE_1, exact).rho > 1
    assert np.isinf(context_bound(PORTABLE_1, exact)).all()
    assert np.isinf(lse_bound(PORTABLE_1, exact, 0.0))


def test_depth_is_block_and_blocks():
    assert PORTABLE_1.depth(2048) == 64 + 32
    assert PORTABLE_1.depth(3) == 4
    assert ORACLE_64.depth(2048) == 2048


def test_a_bad_exponential_is_measured():
    x = -np.linspace(0, 80, 4001, dtype=np.float32)
    assert exp_error(lambda v: np.exp(v.astype(np.float64)).astype(np.float32), x) <= U32
    assert exp_error(lambda v: (np.exp(v.astype(np.float64)) * (1 + 2.0**-20)).astype(np.float32), x) > PORTABLE_1.exp_eps


def test_the_engine_exponential_is_within_the_declared_error():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    draws = (np.abs(rng.standard_normal(1 << 18)) * 20, rng.uniform(0, 87, 1 << 18), np.exp2(rng.uniform(-60, 6, 1 << 18)))
    x = -np.concatenate(draws)
    x = np.sort(x.astype(np.float32))
    for piece in (x, x[: 1 << 10], x[:7]):
        assert exp_error(lambda v: torch.from_numpy(v).exp().numpy(), piece) <= PORTABLE_1.exp_eps


def test_the_engine_gemm_adds_a_block_at_once():
    torch = pytest.importorskip("torch")

    def engine(c, p, v):
        return torch.from_numpy(c.copy()).addmm_(torch.from_numpy(p), torch.from_numpy(v)).numpy()

    def one_by_one(c, p, v):
        out = c.copy()
        for i in range(p.shape[1]):
            out += np.outer(p[:, i], v[i])
        return out

    assert adds_blocks_once(engine, 64)
    assert not adds_blocks_once(one_by_one, 64)
