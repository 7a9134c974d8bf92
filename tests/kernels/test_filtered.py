"""The portable engine's filter: the selected bytes are those of the exact scores whatever the data, and its limits hold."""

import numpy as np
import pytest
import torch
from bare_ranks import make_call
from engines import Index, One, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.core.errors import PalimpsestError
from palimpsest.kernels import sizes
from palimpsest.kernels.index_select import candidates, certificate, filtered
from palimpsest.kernels.index_select.contract import CONTRACT
from palimpsest.kernels.index_select.rescore import Rescore

E4M3 = torch.float8_e4m3fn


def ignore(event, **data):
    """A tap: a watched call scores every key exactly, as the engine did before it had a filter."""


def poison_codes(problem, *places):
    """NaN codes at (plane, flat index)."""
    for plane, at in places:
        getattr(problem, plane).view(torch.uint8).view(-1)[at] = 0x7F if at % 2 else 0xFF


def alike(problem):
    problem.keys[:] = problem.keys[0].clone()
    problem.weights.abs_()


def steps(problem, start, step):
    """Scores that differ in the last bits: one key, scales a few units in the last place apart."""
    alike(problem)
    scales = np.full(problem.tokens, np.float32(start)).view(np.int32) + step * np.arange(problem.tokens, dtype=np.int32)
    problem.scales.copy_(torch.from_numpy(scales.view(np.float32)))


def ascending(p):
    steps(p, 0.5, 1000)


def descending(p):
    steps(p, 1.5, -700)


def near_ties(p):
    steps(p, 1.0, 1)


def near_ties_down(p):
    steps(p, 1.0, -1)


def constant(p):
    alike(p)
    p.scales[:] = 1.0


def few(p):
    p.keys[:] = p.keys[torch.arange(p.tokens) % 3].clone()
    p.scales[:] = 0.5


def lattice(p):
    g = torch.Generator().manual_seed(5)

    def draw(t, low, high):
        return torch.randint(low, high, t.shape, generator=g).float()

    p.keys, p.queries, p.scales = draw(p.keys, -1, 2).to(E4M3), draw(p.queries, -1, 2).to(E4M3), torch.ones(p.tokens)
    p.weights = draw(p.weights, -2, 3)


def zeros(p):
    p.queries.view(torch.uint8).zero_()
    p.scales[::2] *= -1


def nan_keys(p):
    poison_codes(p, ("keys", 3), ("keys", p.keys.numel() // 2), ("keys", p.keys.numel() - 1))


def nan_queries(p):
    poison_codes(p, ("queries", 0), ("queries", p.queries.numel() - 1))


def nan_scales(p):
    p.scales[7], p.scales[-3], p.scales[p.tokens // 2] = torch.nan, torch.inf, -torch.inf


def nan_weights(p):
    p.weights[0, 0], p.weights[-1, 0], p.weights[p.rows // 2, -1] = torch.nan, torch.inf, -torch.inf


def all_nan(p):
    p.weights[:] = torch.nan


def no_finite(p):
    p.scales[:] = torch.inf


def negative_scales(p):
    p.scales[::5] *= -1


def zero_scales(p):
    p.scales[1::3] = 0.0


def overflowing(p):
    p.weights *= 1e37


def huge(p):
    p.weights *= 2.0**40


def subnormal(p):
    p.weights *= 2.0**-140


def tiny(p):
    p.weights *= 1e-30


def wide_range(p):
    p.weights *= torch.exp2(torch.randint(-40, 40, p.weights.shape, generator=torch.Generator().manual_seed(2)))


def outliers(p):
    p.keys[::97] = 448.0
    p.scales[::101] *= 2.0**30


KINDS = [
    ascending, descending, near_ties, near_ties_down, constant, few, lattice, zeros, nan_keys, nan_queries, nan_scales,
    nan_weights, all_nan, no_finite, negative_scales, zero_scales, overflowing, huge, subnormal, tiny, wide_range, outliers,
]  # fmt: skip


def same(one, other):
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", [None, *KINDS], ids=lambda kind: kind.__name__ if kind else "random")
def test_the_filter_changes_no_byte(kind):
    """Against the exact path and the reference, over more keys than a row's candidates, ragged at the end."""
    problem = Index(11, 3011, heads=5, dim=24, topk=200, seed=3)
    if kind:
        kind(problem)
    found = problem.select("portable", 3000)
    assert same(found, problem.select("portable", 3000, tap=ignore)), "watching changed the result"
    assert same(found, problem.select("reference", 3000))


@pytest.mark.parametrize("topk", [1, 64, 700])
@pytest.mark.parametrize("kind", [ascending, near_ties, constant, lattice, nan_keys], ids=lambda kind: kind.__name__)
def test_every_size_of_top_k(kind, topk):
    problem = Index(3, 2600, heads=2, dim=8, topk=topk, seed=topk)
    kind(problem)
    for history in (0, topk - 1, topk, 1023, 1024, 2597):
        assert same(problem.select("portable", history), problem.select("reference", history)), f"{history} before"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_data_selects_what_the_reference_selects(data):
    heads, dim = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3, 8, 16]))
    rows, tokens = data.draw(st.integers(1, 19)), data.draw(st.integers(20, 2500))
    problem = Index(rows, tokens, heads, dim, topk=data.draw(st.integers(1, 90)), seed=data.draw(st.integers(0, 2**20)))
    for kind in data.draw(st.lists(st.sampled_from(KINDS), max_size=2)):
        kind(problem)
    history = data.draw(st.integers(0, tokens - rows))
    assert same(problem.select("portable", history), problem.select("reference", history))


@pytest.mark.parametrize("kind", [None, lattice, near_ties], ids=lambda kind: kind.__name__ if kind else "random")
def test_no_size_of_the_filter_is_in_the_result(monkeypatch, kind):
    problem = Index(9, 1500, heads=3, dim=8, topk=50, seed=9)
    if kind:
        kind(problem)
    whole = problem.select("portable", 1491)
    parts = [problem.select("portable", 1491, rows=r) for r in ((0, 2), (2, 9))]
    assert same([torch.cat(p) for p in zip(*parts, strict=True)], whole)
    parts = [problem.select("portable", 1491, rank=r, ranks=4) for r in range(3)]
    assert same([torch.cat(p) for p in zip(*parts, strict=True)], whole)
    for keys, block, lines, columns, exact in ((64, 1, 1, 64, 16), (256, 3, 6, 100, 7)):
        for name, value in (
            ("FILTER_KEYS", keys), ("FILTER_BLOCK", block), ("FILTER_LINES", lines), ("FILTER_COLUMNS", columns),
            ("EXACT_KEYS", exact),
        ):  # fmt: skip
            for module in (sizes, filtered, candidates):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        assert same(problem.select("portable", 1491), whole), f"tiles of {keys} keys"


def group_of(problem):
    """The filter's scratch, with all rows loaded."""
    params = {"topk": problem.topk, "heads": problem.heads, "dim": problem.dim, "format": "fp8", "ranks": 1}
    planes = {
        "index_history": {"keys": problem.keys, "scales": problem.scales},
        "index_query": {"q": problem.queries},
        "head_weights": {"w": problem.weights},
    }
    group = filtered._Group(make_call("index_select", params, planes, One()))
    group.load(0, problem.rows)
    return group


def alternating(p):
    """Dots that cancel: sums of large terms of both signs."""
    p.keys[:, ::2], p.keys[:, 1::2] = 240.0, -256.0


def one_sign(p):
    """No cancelling: every rounding of a sum goes the way its terms make it."""
    p.keys.copy_(p.keys.float().abs() + 0.3)
    p.queries.copy_(p.queries.float().abs() + 0.3)
    p.weights.abs_()


BOUNDED = [None, alternating, one_sign, lattice, ascending, wide_range, outliers, tiny, subnormal]


@pytest.mark.parametrize("kind", BOUNDED, ids=lambda kind: kind.__name__ if kind else "random")
@pytest.mark.parametrize(("heads", "dim"), [(64, 128), (3, 8), (1, 1)])
def test_the_limits_hold(kind, heads, dim):
    """Of every key: the exact score lies within, and the limits are no wider than the bound says."""
    problem = Index(4, 2048, heads, dim, topk=64, seed=heads)
    if kind:
        kind(problem)
    group, exact = group_of(problem), np.empty(1024, np.float32)
    for start in (0, 1024):
        assert group.fast.load_keys(start, 1024)
        lows, highs, bound = torch.empty(3, 4, 1024)
        group.fast.limits(range(4), start, lows, highs, bound)
        group.rescore.forget()
        for row in range(4):
            assert group.bounded[row]
            group.rescore.tile_scores(row, start, exact)
            assert (lows[row].numpy() <= exact).all()
            assert (exact <= highs[row].numpy()).all()
            weight = np.abs(problem.weights[row].double().numpy()) @ np.abs(problem.queries[row].double().numpy()).sum(1)
            peak = np.abs(problem.keys[start : start + 1024].double().numpy()).max(1)
            scale = problem.scales[start : start + 1024].double().numpy()
            wanted = certificate.slack(heads, dim) * (weight + certificate.TINY) * peak * scale
            # the seven roundings that form it in fp32, and one of ``wanted``
            assert (np.abs(bound[row].numpy() - wanted) <= ((1 + 2.0**-24) ** certificate.SPARE - 1) * wanted).all()


@pytest.mark.parametrize("kind", [None, constant, ascending, near_ties], ids=lambda kind: kind.__name__ if kind else "random")
def test_no_key_is_scored_exactly_twice(monkeypatch, kind):
    problem, asked, honest = Index(2, 6000, heads=4, dim=16, topk=300), {}, Rescore.picked_scores

    def watched(self, slot, ids):
        for token in ids.tolist():
            asked[slot, token] = asked.get((slot, token), 0) + 1
        return honest(self, slot, ids)

    if kind:
        kind(problem)
    monkeypatch.setattr(Rescore, "picked_scores", watched)
    problem.select("portable", 5998)
    assert max(asked.values(), default=1) == 1
    assert asked or kind is None
    if kind is None:
        assert len(asked) < 600, "the filter decides nearly everything on random data"


def test_coarse_fp32_products_are_not_trusted(monkeypatch):
    """A process that lets torch round fp32 inputs gets exact scores throughout, and keeps its setting."""
    problem = Index(3, 1500, heads=4, dim=16, topk=100)
    wanted = problem.select("reference", 1497)
    matmul = torch.backends.mkldnn.matmul
    monkeypatch.setattr(filtered._Fast, "limits", lambda *_: pytest.fail("fast scores under a coarse precision"))
    before = matmul.fp32_precision
    try:
        for value in ("bf16", "tf32"):
            matmul.fp32_precision = value
            assert not filtered.fp32_is_fp32()
            assert same(problem.select("portable", 1497), wanted)
            assert matmul.fp32_precision == value
    finally:
        matmul.fp32_precision = before


def test_a_product_outside_its_limits_is_an_error_that_names_the_token(monkeypatch):
    problem, honest = Index(1, 3000, heads=4, dim=16, topk=100), torch.bmm
    constant(problem)

    def coarse(left, right, *, out):
        honest(left, right, out=out)
        out.mul_(1 + 2.0**-9)

    monkeypatch.setattr(torch, "bmm", coarse)
    with pytest.raises(PalimpsestError, match=r"token \d+ scores .* outside the limits .*fp32_precision"):
        problem.select("portable", 2999)


@pytest.mark.parametrize("heads", [1, 8, 32, 64])
@pytest.mark.parametrize("topk", [64, 2048])
def test_scratch_is_small_whatever_the_history(heads, topk):
    assert CONTRACT.scratch(topk=topk, heads=heads, dim=128, format="fp8") <= 4 << 20


@pytest.mark.parametrize("shape", [(1, 1, 1), (2048, 128, 128), (16, 300, 8), (4096, 64, 256), (1, 2, 512)])
def test_scratch_suffices_with_and_without_a_watcher(shape):
    topk, heads, dim = shape
    problem = Index(17, 80, heads, dim, topk=topk)
    assert same(problem.select("portable", 60), problem.select("portable", 60, tap=ignore))
