"""A row's bytes do not depend on chunks, tiles, ranks, stale bytes or later tokens; and the engines agree over whole layers."""

import pytest
import torch
from micro import FORMATS, FP8, FP32, PAGE, TOKENS, TOPK, geometry, hidden_rows, prefill

from palimpsest.kernels.call import Chunk

ONE_BY_ONE = [1] * TOKENS
SPLITS = {"whole": [16] * 4, "ragged": [7, 9, 0, 16, 3, 13, 16], "fives": [5] * 12 + [4], "one by one": ONE_BY_ONE}


def shape_of(formats: str):
    return geometry(latent=128 if formats == "fp8_ds_mla" else 16)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_chunks_and_ranks_do_not_change_bytes(formats, ranks):
    g, hidden = shape_of(formats), hidden_rows()
    base = prefill(g, FORMATS[formats], 1, SPLITS["whole"], hidden)
    assert base.output.isfinite().all()
    for name, split in SPLITS.items():
        assert base.same(prefill(g, FORMATS[formats], ranks, split, hidden)), f"{name} on {ranks} ranks"


@pytest.mark.parametrize("heads", [12, 6])
def test_head_groups_keep_the_sum_when_ranks_change(heads):
    g, hidden = geometry(heads=heads), hidden_rows()
    base = prefill(g, FP32, 1, [16] * 4, hidden)
    for ranks in (2, 4):
        if heads % ranks == 0:
            assert base.same(prefill(g, FP32, ranks, [16] * 4, hidden))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_caches_hold_the_same_pages_whatever_the_ranks(ranks):
    g, hidden = geometry(), hidden_rows()
    whole = prefill(g, FP8, 1, [16] * 4, hidden).caches[0]
    found = prefill(g, FP8, ranks, [7, 9, 16, 16, 16], hidden).caches
    for name, bytes_ in whole.items():
        pages = bytes_.view(TOKENS // PAGE, -1)
        for page in range(TOKENS // PAGE):
            mine = found[page % ranks][name].view(TOKENS // PAGE // ranks, -1)[page // ranks]
            assert torch.equal(mine, pages[page]), f"{name} page {page}"


@pytest.mark.parametrize("formats", ["fp8", "fp32"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_stale_bytes_never_reach_a_result(formats, ranks):
    g, hidden = geometry(), hidden_rows()
    base = prefill(g, FORMATS[formats], ranks, [16, 5, 16], hidden, poison=0)
    for byte in (0x7F, 0xFF, 0x80, 0x01):
        assert base.same(prefill(g, FORMATS[formats], ranks, [16, 5, 16], hidden, poison=byte)), f"poison {byte:#x}"


@pytest.mark.parametrize("chunks", [[6], [8], [9], [16, 16], [3, 3], [1] * 12])
def test_a_later_token_changes_no_earlier_row(chunks):
    """Field case 4.8: below, at and above top-k."""
    g, hidden = geometry(), hidden_rows()
    base = prefill(g, FP32, 2, chunks, hidden)
    last = sum(chunks) - 1
    changed = hidden.clone()
    changed[last] = -3 * changed[last] + 1
    other = prefill(g, FP32, 2, chunks, changed)
    assert torch.equal(base.output[:last], other.output[:last])
    assert torch.equal(base.ids[:last], other.ids[:last])
    assert not torch.equal(base.output[last], other.output[last])


@pytest.mark.parametrize("formats", ["fp8", "fp32"])
def test_ids_are_ascending_causal_and_padded(formats):
    outcome = prefill(geometry(), FORMATS[formats], 2, [16] * 4, hidden_rows())
    for token in range(TOKENS):
        count = min(TOPK, token + 1)
        ids = outcome.ids[token].tolist()
        assert outcome.counts[token] == count
        assert ids[:count] == sorted(set(ids[:count]))
        assert 0 <= ids[0] <= ids[count - 1] <= token
        assert ids[count:] == [-1] * (TOPK - count)


@pytest.mark.parametrize("index_heads", [2, 8])
def test_engines_select_the_same_sets(index_heads):
    g, hidden = geometry(index_heads=index_heads), hidden_rows()
    portable, reference = (prefill(g, FP8, 2, [16, 7, 9, 16], hidden, engine=e) for e in ("portable", "reference"))
    assert torch.equal(portable.ids, reference.ids)
    assert torch.equal(portable.counts, reference.counts)


def test_taps_cover_every_visible_score_once():
    seen, groups = {}, []

    def tap(event, **data):
        if event == "selected":
            groups.append(data["rows"])
            return
        assert event == "scores"
        assert not data["scores"].flags.writeable
        for j, score in enumerate(data["scores"]):
            seen[data["row"], data["start"] + j] = float(score)

    prefill(geometry(), FP8, 1, [16, 5], hidden_rows(), tap=tap)
    assert groups == [range(0, 16), range(0, 5)]
    assert {(r, j) for r, j in seen if j > 16 + r} == set()
    assert all((r, j) in seen for r in range(5) for j in range(16 + r + 1))


def test_no_rows_moves_nothing_but_the_barrier():
    g, hidden = geometry(), hidden_rows()
    generations = []

    def before(rank, chunk: Chunk):
        generations.append(rank.view("signals").tolist())

    base = prefill(g, FP8, 2, [16, 16], hidden)
    other = prefill(g, FP8, 2, [0, 16, 0, 0, 16, 0], hidden, before=before)
    assert base.same(other)
    assert sorted(generations)[-1] == [5, 5]
