"""Sparse attention: against the unabsorbed dense-masked formula in fp64, and what padding, NaN and order mean."""

import math

import pytest
import torch
from bare_ranks import WireComm, Wires, make_call

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Draw, one, unit
from palimpsest.kernels.sparse_attend.cases import records
from palimpsest.kernels.table import implementation

TOKENS, LATENT, ROPE, NOPE, V, HEADS = 96, 16, 4, 8, 8, 4


def params(topk, kind="fp32", heads=HEADS):
    return {
        "topk": topk, "heads": heads, "kv_lora": LATENT, "rope_dims": ROPE, "format": kind, "latent_scale": 1.0,
        "softmax_scale": 0.29,
    }  # fmt: skip


def attend(p, ids, counts, history, query, engine="portable"):
    context = torch.full((query.shape[0], p["heads"], LATENT), math.nan)
    planes = one(ids=ids, counts=counts, latent_history=history, query=query, context=context)
    implementation("sparse_attend", engine)(
        make_call("sparse_attend", p, planes, WireComm(Wires(1), 0)), Chunk(0, query.shape[0])
    )
    return context


def padded(rows, topk):
    ids = torch.full((len(rows), topk), -1, dtype=torch.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(sorted(row), dtype=torch.int32)
    return ids, torch.tensor([len(row) for row in rows], dtype=torch.int32)


@pytest.mark.parametrize("seed", range(3))
def test_absorbed_attention_is_the_dense_masked_formula(seed):
    """The dense side expands keys k = W_UK c and scores q_nope.k + q_pe.kr over all tokens under the selection mask.

    Bound: u for each fp32 rounding of a logit (value and shift), of exp (4 ulp), and count u for each of two sums; times sum
    p|v|, through |W_UV|. The absorbed query is given in fp32, one rounding away from exact, which moves a logit by at most u sum
    |q||c|."""
    draw, topk, count, rows = Draw(seed), 32, 25, 3
    c, kr = draw.normal((TOKENS, LATENT)), draw.normal((TOKENS, ROPE))
    up, value_up = draw.normal((HEADS, NOPE, LATENT)).double(), draw.normal((HEADS, V, LATENT)).double()
    q_nope, q_pe = draw.normal((rows, HEADS, NOPE)).double(), draw.normal((rows, HEADS, ROPE))
    picked = [torch.randperm(TOKENS, generator=draw.generator)[:count].tolist() for _ in range(rows)]
    ids, counts = padded(picked, topk)
    absorbed = torch.einsum("thn,hnc->thc", q_nope, up)
    query = torch.cat([absorbed.float(), q_pe], 2)
    history = torch.cat([c, kr], 1).view(torch.uint8)
    context = attend(params(topk), ids, counts, history, query)

    keys = torch.einsum("hnc,jc->hjn", up, c.double())
    logits = torch.einsum("thn,hjn->thj", q_nope, keys) + torch.einsum("thr,jr->thj", q_pe.double(), kr.double())
    mask = torch.full((rows, TOKENS), -math.inf, dtype=torch.float64)
    for row, chosen in enumerate(picked):
        mask[row, chosen] = 0
    weight = (logits * 0.29 + mask[:, None]).softmax(2)
    dense = torch.einsum("thj,hvc,jc->thv", weight, value_up, c.double())
    found = torch.einsum("thc,hvc->thv", context.double(), value_up)

    u = unit(torch.float32)
    size = torch.einsum("thc,jc->thj", query.double().abs(), torch.cat([c, kr], 1).double().abs()).amax(2) * 0.29
    relative = 2 * (u * (size + 4 * size + 4) + count * u) + 4 * u
    reach = torch.einsum("thj,hvc,jc->thv", weight, value_up.abs(), c.double().abs())
    assert ((found - dense).abs() <= relative[:, :, None] * reach).all()
    assert relative.max() < 1e-4, "the bound must have power"


def test_a_wrong_record_exceeds_the_bound():
    """The self-test of the bound above: swapping one id of 25 moves the result further."""
    draw, p = Draw(5), params(32)
    history = torch.cat([draw.normal((TOKENS, LATENT)), draw.normal((TOKENS, ROPE))], 1).view(torch.uint8)
    query = draw.normal((1, HEADS, LATENT + ROPE)) / 4
    right, wrong = padded([range(25)], 32), padded([range(1, 26)], 32)
    gap = (attend(p, *right, history, query) - attend(p, *wrong, history, query)).abs().max()
    assert gap > 1e-4 * 4


@pytest.mark.parametrize("engine", ["portable", "reference"])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32"])
def test_padding_is_not_token_zero(engine, kind):
    """Field case 4.4: token 0 is all NaN; rows that do not select it stay clean whatever lies behind their count."""
    p, draw = params(8, kind), Draw(0)
    history = records(draw, p, TOKENS)
    query = draw.normal((4, HEADS, LATENT + ROPE), "bf16")
    ids, counts = padded([[3], [1, 2, 5], [], range(1, 9)], 8)
    clean = attend(p, ids, counts, history, query, engine)
    poisoned = history.clone()
    poisoned[0] = 0xFF
    assert torch.equal(clean, attend(p, ids, counts, poisoned, query, engine))
    for junk in (0, 7, 2**31 - 1, -(2**31)):
        behind = ids.clone()
        behind[torch.arange(8)[None] >= counts[:, None]] = junk
        assert torch.equal(clean, attend(p, behind, counts, poisoned, query, engine)), "counts are authoritative"
    assert torch.equal(clean[2], torch.zeros(HEADS, LATENT))
    assert clean.isfinite().all()


@pytest.mark.parametrize("engine", ["portable", "reference"])
def test_a_nan_record_reaches_the_context(engine):
    p, draw = params(8, "fp8"), Draw(1)
    history = records(draw, p, TOKENS)
    history[4, 2] = 0x7F
    query = draw.normal((2, HEADS, LATENT + ROPE), "bf16")
    ids, counts = padded([[3, 4], [3, 5]], 8)
    context = attend(p, ids, counts, history, query, engine)
    assert context[0].isnan().all()
    assert context[1].isfinite().all()


def test_a_head_does_not_depend_on_its_place():
    """Any subset of heads, at any offset inside a head tile, gives the same bytes: so ranks may hold any slice."""
    draw = Draw(2)
    history = records(draw, params(130, "bf16"), TOKENS)
    query = draw.normal((2, 16, LATENT + ROPE))
    ids, counts = padded([range(70), range(5, 96)], 130)
    whole = attend(params(130, "bf16", 16), ids, counts, history, query)
    for first in range(16):
        for heads in (1, 3, 8):
            if first + heads <= 16:
                part = attend(params(130, "bf16", heads), ids, counts, history, query[:, first : first + heads].contiguous())
                assert torch.equal(part, whole[:, first : first + heads])


def test_duplicate_and_unsorted_ids_are_attended_as_emitted():
    p, draw = params(8, "fp32"), Draw(3)
    history = records(draw, p, TOKENS)
    query = torch.zeros(1, HEADS, LATENT + ROPE)
    ids, counts = torch.tensor([[9, 2, 9, 9, -1, -1, -1, -1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    values = history.view(torch.float32)[:, :LATENT]
    assert torch.equal(attend(p, ids, counts, history, query)[0, 0], (values[9] * 3 + values[2]) / 4)
