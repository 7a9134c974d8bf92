"""Selection: the stated rule on rows of many ties, NaN accounting, tile boundaries, and a certificate on random data."""

import math
from fractions import Fraction

import pytest
import torch
from bare_ranks import WireComm, Wires, make_call

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Draw, one
from palimpsest.kernels.sizes import KEY_TILE
from palimpsest.kernels.table import implementation

HEADS, DIM = 2, 8


def select(keys, scales, query, weights, *, topk, history, engine="portable", kind="fp8", tap=None):
    """ids [rows, topk], counts [rows], nans [rows] of one rank."""
    rows = query.shape[0]
    planes = one(index_query=query, head_weights=weights, local_ids=torch.full((rows, topk), -7, dtype=torch.int32))
    planes["local_counts"] = {
        "counts": torch.full((rows,), -7, dtype=torch.int32),
        "nans": torch.full((rows,), -7, dtype=torch.int32),
    }
    planes["index_history"] = {"keys": keys, "scales": scales} if kind == "fp8" else {"keys": keys}
    params = {"topk": topk, "heads": HEADS, "dim": query.shape[2], "format": kind, "ranks": 1}
    call = make_call("index_select", params, planes, WireComm(Wires(1), 0), **({"tap": tap} if tap else {}))
    implementation("index_select", engine)(call, Chunk(history, rows))
    return planes["local_ids"]["local_ids"], planes["local_counts"]["counts"], planes["local_counts"]["nans"]


def one_dimension(scores):
    """Keys, scales and weights so that token j scores exactly scores[j] (any fp32): the scale carries it."""
    n = len(scores)
    keys = torch.zeros(n, DIM)
    keys[:, 0] = 1
    query = torch.zeros(1, HEADS, DIM)
    query[0, 0, 0] = 1
    e4m3 = torch.float8_e4m3fn
    return keys.to(e4m3), torch.tensor(scores, dtype=torch.float32), query.to(e4m3), torch.tensor([[1.0, 0.0]])


def expected(scores, topk):
    ranked = [-math.inf if math.isnan(s) else s for s in scores]
    best = sorted(range(len(scores)), key=lambda j: (-ranked[j], j))[:topk]
    return sorted(best) + [-1] * (topk - len(best))


ROWS = {
    "constant": [1.5] * 40,
    "zeros of both signs": [0.0, -0.0] * 20,
    "plateau below": [5.0, 4.0] + [0.0] * 30 + [-1.0] * 8,
    "few values": [1.0, 2.0, 3.0, 2.0] * 10,
    "ascending": [float(j) for j in range(40)],
    "descending": [float(-j) for j in range(40)],
    "one NaN": [1.0] * 10 + [math.nan] + [2.0] * 3 + [0.5] * 26,
    "all NaN": [math.nan] * 40,
    "NaN beside -inf": [-math.inf, math.nan] * 20,
    "few finite": [math.nan] * 37 + [1.0, -1.0, 0.0],
    "infinities": [math.inf, -math.inf, 1.0, math.inf] * 10,
    "subnormal neighbours": [1e-45, 0.0, -1e-45, 3e-45] * 10,
    "extremes": [3.4e38, -3.4e38, 1e-38, -1e-38] * 10,
}


@pytest.mark.parametrize("topk", [1, 7, 8, 39, 40, 41])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("engine", ["portable", "reference"])
def test_the_rule_on_hostile_rows(name, topk, engine):
    scores = ROWS[name]
    ids, counts, nans = select(*one_dimension(scores), topk=topk, history=39, engine=engine)
    assert ids[0].tolist() == expected(scores, topk)
    assert counts[0] == min(topk, 40)
    assert nans[0] == sum(map(math.isnan, scores))


@pytest.mark.parametrize("visible", [1, 7, 8, 9, 10, 12, 63, 64])
def test_contexts_around_top_k(visible):
    scores = [float((7 * j) % 5) for j in range(64)]
    ids, counts, _ = select(*one_dimension(scores), topk=8, history=visible - 1)
    assert ids[0].tolist() == expected(scores[:visible], 8)
    assert counts[0] == min(8, visible)


@pytest.mark.parametrize("past", [-1, 0, 1, 77])
def test_ties_across_key_tiles_go_to_the_lowest_ids(past):
    n = KEY_TILE + past
    scores = [0.0] * n
    scores[3], scores[n - 1] = 1.0, 1.0
    ids, _, _ = select(*one_dimension(scores), topk=64, history=n - 1)
    assert ids[0].tolist() == [*range(63), n - 1]


@pytest.mark.parametrize("kind", ["fp8", "fp32"])
def test_streamed_scores_do_not_depend_on_where_the_row_ends(kind):
    """Rows of the same query at different ends see the same bits for the keys they share, across three key tiles."""
    draw, n = Draw(0), 2 * KEY_TILE + 50
    keys, query = draw.normal((n, DIM)), draw.normal((1, HEADS, DIM)).repeat(3, 1, 1)
    weights, scales = draw.normal((1, HEADS)).repeat(3, 1), draw.normal((n,)).abs()
    if kind == "fp8":
        keys, query = keys.to(torch.float8_e4m3fn), query.to(torch.float8_e4m3fn)
    whole = {}

    def tap(event, **data):
        if event == "scores":
            for j, bits in enumerate(data["scores"].view("int32").tolist()):
                assert whole.setdefault(data["start"] + j, bits) == bits

    for history in (n - 3, KEY_TILE - 2, 17):
        select(keys, scales, query, weights, topk=16, history=history, kind=kind, tap=tap)
    assert len(whole) == n


def test_gemms_over_fp32_records_have_one_shape(monkeypatch):
    """Their dots round, so the shape is part of the arithmetic, however few keys a tile holds."""
    shapes, honest = set(), torch.mm

    def watched(left, right, *, out):
        shapes.add((*left.shape, right.shape[1]))
        return honest(left, right, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    draw = Draw(8)
    keys, query, weights = draw.normal((KEY_TILE + 9, DIM)), draw.normal((2, HEADS, DIM)), draw.normal((2, HEADS))
    for history in (0, 40, KEY_TILE + 7):
        select(keys, None, query, weights, topk=8, history=history, kind="fp32")
    assert shapes == {(HEADS, DIM, KEY_TILE)}


def test_scores_are_the_exact_sum_rounded_once():
    """fp8 dots are exact, and with weights of few bits so is the whole sum: compare with rational arithmetic."""
    draw, n = Draw(4), 50
    keys = draw.codes(n, DIM).view(torch.float8_e4m3fn)
    query = draw.codes(2, HEADS, DIM).view(torch.float8_e4m3fn)
    weights, scales = draw.integers((2, HEADS)) / 8, torch.exp2(draw.integers((n,)))
    found = {}

    def tap(event, **data):
        if event == "scores":
            found[data["row"]] = data["scores"].copy()

    select(keys, scales, query, weights, topk=8, history=n - 2, tap=tap)
    for row in range(2):
        for j in range(n - 1 + row):
            total = Fraction(0)
            for h in range(HEADS):
                pairs = zip(query[row, h].float().tolist(), keys[j].float().tolist(), strict=True)
                dot = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
                total += Fraction(weights[row, h].item()) * max(dot, Fraction(0))
            total *= Fraction(scales[j].item())
            assert found[row][j] == torch.tensor(float(total), dtype=torch.float64).float().item()
            assert math.copysign(1, found[row][j]) == 1 or total < 0


def test_no_candidate_is_dropped_on_long_low_contrast_rows():
    """Field case 4.1: every selected score is at least every unselected one, on recomputed scores."""
    draw, n, topk = Draw(6), 3 * KEY_TILE, 256
    keys = (1 + draw.integers((n, DIM)) / 64).to(torch.float8_e4m3fn)
    query, weights = draw.integers((2, HEADS, DIM), "fp32", 1, 2).to(torch.float8_e4m3fn), torch.ones(2, HEADS)
    ids, _, _ = select(keys, torch.ones(n), query, weights, topk=topk, history=n - 2)
    for row in range(2):
        dots = torch.einsum("hd,nd->hn", query[row].double(), keys[: n - 1 + row].double()).clamp(min=0).sum(0)
        chosen = torch.zeros(len(dots), dtype=torch.bool)
        chosen[ids[row].long()] = True
        assert chosen.sum() == topk
        cut = dots[chosen].min()
        assert cut >= dots[~chosen].max()
        tied = (dots == cut).nonzero().view(-1)
        assert chosen[tied].int().diff().max() <= 0, "among equals the lowest ids win"
