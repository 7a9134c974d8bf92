"""Field cases A4: selections that are well formed and wrong, and masks, lengths and addresses that go with them."""

import dataclasses

import numpy as np
import pytest
import torch

from palimpsest.core.errors import PlanRefused, Unsupported, UserError
from palimpsest.core.spec import Limits
from palimpsest.kernels.sizes import KEY_TILE
from palimpsest.plan.check import check
from palimpsest.plan.place import place
from palimpsest.recipes import default_formats, load_geometry
from palimpsest.recipes import program as recipe_program

#: contexts of the matrix: around top-k (9 to 12 have natural ties) and around the capacity
CONTEXTS = (1, 7, 8, 9, 10, 12, 63, 64)


def low_contrast(m0, tokens: int) -> torch.Tensor:
    """Rows that differ in the fourth digit only, so that all scores of a row fall into one coarse bucket."""
    one = torch.randn(32, generator=torch.Generator().manual_seed(3))
    return one + 1e-3 * torch.randn(tokens, 32, generator=torch.Generator().manual_seed(4))


def rule(scores: np.ndarray, topk: int) -> list[int]:
    """Score descending, then token id ascending; NaN as -inf; ids ascending."""
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    return sorted(np.lexsort((np.arange(len(scores)), -ranked))[:topk].tolist())


def observed(m0, chunks, rows=None, **setup):
    """(outcome, scores by row) of one rank."""
    scores = m0.Scores()
    (found,) = m0.run(lambda session: m0.whole(session, chunks, rows, before=scores.begin, hooks=scores.hooks), **setup)
    return found, scores


@pytest.mark.parametrize("formats", ["FP8", "FP32"])
def test_4_01_no_unselected_score_beats_a_selected_one(m0, formats: str) -> None:
    """4.1 and 4.19: on low-contrast rows the selected scores are the largest, and all of their value mass is recalled."""
    found, scores = observed(
        m0, (16, 16, 16, 16), low_contrast(m0, 64), formats=getattr(m0, formats), made=m0.geometry(rope="none")
    )
    buckets = 0
    for row, ids in enumerate(found.sets()):
        values = scores.rows[row]
        assert len(values) == row + 1
        out = np.delete(values, ids)
        assert not len(out) or values[ids].min() >= out.max(), row
        recall = np.sort(values[ids].astype(np.float64)).sum() / np.sort(values.astype(np.float64))[-len(ids) :].sum()
        assert recall == 1.0
        buckets += len(set((values.view(np.uint32) >> 21).tolist())) == 1
    assert buckets > 16, "the rows were meant to be indistinguishable to a coarse bucket"


def test_4_01_nothing_is_dropped_beyond_a_key_tile(m0) -> None:
    """More keys than one tile holds, all in one bucket and rising: the last ones win, and they are all there."""
    tokens = 2 * KEY_TILE + 64

    def ones(step, call, chunk):
        call.view("index_query").view(torch.uint8).fill_(0x38)
        call.view("head_weights").fill_(1.0)

    def main(session):
        cache = session.arena.view("index_cache").view(torch.uint8)
        # the records are written by hand: a key of ones whose scale rises with the token
        pages = cache.view(tokens // 64, 64 * 12)
        pages[:, : 64 * 8].view(torch.float8_e4m3fn).fill_(1.0)
        pages[:, 64 * 8 :].view(torch.float32).copy_((1.0 + torch.arange(tokens) * 2.0**-20).view(-1, 64))
        rows = torch.zeros(tokens, 32)
        return m0.prefill(session, (16,), rows, start=tokens - 16, hooks=m0.Watch(before={"index_select": ones})).ids

    (ids,) = m0.run(main, tokens=tokens, page=64)
    for row in range(16):
        written = list(range(tokens - 24, tokens - 16))
        chosen = [j for j in ids[row].tolist() if j < tokens - 16]
        assert set(chosen) <= set(written), row
        assert chosen == written[len(written) - len(chosen) :]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_4_02_infinite_and_broken_records_leave_valid_ids(m0, value: float) -> None:
    """+inf, -inf or NaN in the scale of some keys: ids stay unique and visible, NaN keys lose, and nothing is read elsewhere."""
    scores = m0.Scores()

    def main(session):
        m0.prefill(session, (16,))
        scale = session.arena.view("index_cache")[1][4 * 8 :].view(torch.float32)  # page 1 is tokens 4..7
        assert scale.shape == (4,)
        scale[1] = value
        return m0.prefill(session, (16,), start=16, before=scores.begin, hooks=scores.hooks)

    (found,) = m0.run(main)
    for row, ids in enumerate(found.sets(), 16):
        assert len(ids) == len(set(ids)) == 8
        assert 0 <= min(ids) <= max(ids) <= row
        assert ids == rule(scores.rows[row], 8)


@pytest.mark.parametrize("junk", [-1, 0, 5, 2**31 - 1])
def test_4_04_a_pad_is_no_token(m0, junk: int) -> None:
    """What lies behind a row's count is never attended: not as token 0, not as anything; and token 0 is not erased by it."""
    made = m0.geometry(schedule=("full", "shared"))

    def main(session):
        session.prefill(m0.hidden(8), 0, ids=torch.zeros(8, 8, dtype=torch.int32), counts=torch.ones(8, dtype=torch.int32))
        ids = torch.full((1, 8), -1, dtype=torch.int32)
        ids[0, :2] = torch.tensor([0, 3])
        counts = torch.tensor([2], dtype=torch.int32)
        clean = session.prefill(m0.hidden(9)[8:], 8, ids=ids, counts=counts, copy=True)
        ids[0, 2:] = junk
        dirty = session.prefill(m0.hidden(9)[8:], 8, ids=ids, counts=counts, copy=True)
        ids[0, :2], counts[0] = torch.tensor([3, 0]), 1
        alone = session.prefill(m0.hidden(9)[8:], 8, ids=ids, counts=counts, copy=True)
        return m0.same(clean, dirty), m0.same(clean, alone)

    assert m0.run(main, made=made, layer=1) == [(True, False)]


def test_4_05_lengths_are_never_negative(m0) -> None:
    """More rows than records, a negative history and lengths of zero: refused, or nothing to do; never wrapped to 2**32 - 4."""

    def main(session):
        for history, rows in ((-1, 6), (-5, 6), (64, 1), (1, 17)):
            with pytest.raises(UserError):
                session.prefill(m0.hidden(16), history, rows=rows)
        session.prefill(m0.hidden(1), 0)
        assert session.prefill(m0.hidden(0), 0).shape == (0, 32)
        return m0.prefill(session, (6,), start=1).counts.tolist()

    assert m0.run(main) == [[2, 3, 4, 5, 6, 7]]

    def negative(session):
        counts = torch.tensor([1, -4], dtype=torch.int32)
        with pytest.raises(UserError, match="row 1 counts -4"):
            session.prefill(m0.hidden(2), 0, ids=torch.zeros(2, 8, dtype=torch.int32), counts=counts)

    m0.run(negative, made=m0.geometry(schedule=("full", "shared")), layer=1)


@pytest.mark.parametrize(
    ("model", "latent", "fits"), [("kimi-k3.1-pro", "fp8", True), ("deepseek-v3.2", "bf16", True), ("glm-5.2", "fp32", False)]
)
def test_4_07_offsets_at_a_million_tokens_fit_their_index_type(model: str, latent: str, fits: bool) -> None:
    """By arithmetic, without the memory: the largest byte offset of any record of a 1M context against int32 and int64."""
    geometry = load_geometry(model)
    made = recipe_program(
        geometry, Limits(1 << 20, 4096, 8), default_formats(geometry).replace(latent=latent), geometry.full_layers[0]
    )
    plan = place(made)
    check(made, plan)
    largest = max(p.stop - 1 for p in plan.places if p.kind != "weights")
    assert (largest < 1 << 31) is fits
    if not fits:
        with pytest.raises(PlanRefused, match=r"32-bit kernel offset"):
            check(made, plan, index_bits=32)


def test_4_07_the_page_that_overflows_is_known(m0) -> None:
    """A packed page stride of 1,077,120 B passes int32 at page 1,994: with 1,994 pages it fits, with 1,995 it is refused."""
    stride = 1_077_120
    assert (1 << 31) // stride + 1 == 1994
    made = m0.program()
    for pages, fits in ((1993, True), (1994, False)):
        cache = dataclasses.replace(made.by_name["latent_cache"].planes[0], shape=(pages, stride), axes=("pages", "fixed"))
        grown = dataclasses.replace(
            made, buffers=tuple(dataclasses.replace(b, planes=(cache,)) if b.name == "latent_cache" else b for b in made.buffers)
        )
        plan = place(grown)
        check(grown, plan)
        if fits:
            check(grown, plan, index_bits=32)
        else:
            with pytest.raises(PlanRefused, match="latent_cache"):
                check(grown, plan, index_bits=32)


@pytest.mark.parametrize("length", [6, 8, 9, 12, 16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_4_08_causality_below_at_and_above_topk(m0, length: int, ranks: int) -> None:
    """Changing token j changes no output before row j, and does change row j: with fewer tokens than top-k, as many, and more."""
    rows, changed = m0.hidden(length), {}
    for token in range(length):
        changed[token] = rows.clone()
        changed[token][token] = m0.hidden(1, seed=77)[0]

    def main(session):
        right = m0.whole(session, (length,), rows)
        return right, {token: m0.whole(session, (length,), other) for token, other in changed.items()}

    for right, others in m0.run(main, ranks=ranks):
        for token, other in others.items():
            assert m0.same(other.output[:token], right.output[:token]), (length, token)
            assert m0.same(other.ids[:token], right.ids[:token])
            assert not m0.same(other.output[token], right.output[token])


@pytest.mark.parametrize("topk", [1, 7, 8, 11, 16, 24, 64])
def test_4_10_any_topk_width_is_the_real_one(m0, topk: int) -> None:
    """11 is K + 3 of a pooled expansion; 7 and 24 are in no kernel's table of buckets: the width is the model's, everywhere."""
    made = m0.geometry(topk=topk)
    found, scores = observed(m0, (16, 16, 16, 16), made=made)
    assert found.ids.shape == (64, topk)
    for row, ids in enumerate(found.sets()):
        assert ids == rule(scores.rows[row], topk)
    assert m0.outcome(made=made, ranks=2).same(found)


def test_4_11_scores_are_weighted_sums_of_relus_over_heads(m0) -> None:
    """Against the formula in fp64; the two classical mistakes, no ReLU and one selection per head, select something else."""
    kept = {}

    def look(step, call, chunk):
        kept[chunk.history] = tuple(
            t.double().clone() for t in (call.view("index_history", "keys"), call.view("index_query"), call.view("head_weights"))
        )

    scores = m0.Scores()

    def main(session):
        watch = m0.Watch(after={"index_select": look}, tap=scores._tap)
        return m0.whole(session, (16, 16, 16, 16), before=scores.begin, hooks=watch)

    (found,) = m0.run(main, formats=m0.FP32)
    without_relu = per_head = 0
    for row, ids in enumerate(found.sets()):
        keys, queries, weights = kept[row // 16 * 16]
        dots = queries[row % 16] @ keys[: row + 1].T
        right = (weights[row % 16, :, None] * dots.clamp(min=0)).sum(0)
        mass = (weights[row % 16, :, None].abs() * (queries[row % 16].abs() @ keys[: row + 1].abs().T)).sum(0)
        terms = keys.shape[1] + 2 * len(weights[row % 16]) + 2  # two fp64 evaluations of these roundings, then one to fp32
        bound = 2.0**-24 * right.abs() + 2 * terms * 2.0**-53 * mass
        assert np.all(np.abs(scores.rows[row] - right.numpy()) <= bound.numpy())
        plain = (weights[row % 16, :, None] * dots).sum(0).float().numpy()
        first = (weights[row % 16, 0] * dots[0].clamp(min=0)).float().numpy()
        without_relu += rule(plain, 8) != ids
        per_head += rule(first, 8) != ids
    assert without_relu > 8
    assert per_head > 8


@pytest.mark.parametrize("byte", [0x7E, 0x7F, 0xFF])
def test_4_13_columns_beyond_a_rows_end_are_never_selected(m0, byte: int) -> None:
    """Keys behind the visible ones hold the largest value, or NaN, with the largest scales: no row looks there."""
    right = m0.outcome((16, 16))

    def spoil(step, call, chunk):
        call.view("history", "keys").view(torch.uint8)[chunk.visible :].fill_(byte)
        call.view("history", "scales")[chunk.visible :].fill_(torch.inf)

    def main(session):
        return m0.whole(session, (16, 16), hooks=m0.Watch(after={"gather_index": spoil}))

    assert m0.run(main)[0].same(right)


def test_4_14_fewer_tokens_than_topk(m0) -> None:
    """Row r of an empty context selects its r + 1 tokens; a top-k above the context is refused with both numbers."""
    found = m0.outcome((12,))
    assert found.counts.tolist() == [min(8, row + 1) for row in range(12)]
    assert found.sets()[:8] == [list(range(row + 1)) for row in range(8)]
    with pytest.raises(Unsupported, match="top-k 65 exceeds the context of 64"):
        m0.program(m0.geometry(topk=65))


@pytest.mark.parametrize("start", [5, 16, 48])
def test_4_16_ids_are_tokens_of_the_request_whatever_the_chunk(m0, start: int) -> None:
    """A chunk that begins at token 5 reports the same coordinates as one that began at 0: tokens, not columns of the chunk."""
    found, scores = observed(m0, tuple([16] * (start // 16)) + ((start % 16, 11) if start % 16 else (16,)))
    one = m0.outcome((*[16] * (start // 16), 16))
    assert found.same(one)
    assert any(min(ids) < start for ids in found.sets()[start:])
    for row, ids in enumerate(found.sets()):
        assert ids == rule(scores.rows[row], 8)


def test_4_17_structural_ties_go_to_the_lowest_ids(m0) -> None:
    """Two index heads leave exact zeros by themselves: rows whose cutoff lies in them select by the rule, on all ranks."""
    chunkings = [m0.plain(context) for context in CONTEXTS]
    found = {}

    def main(session):
        for chunks in chunkings:
            scores = m0.Scores()
            found[chunks] = m0.whole(session, chunks, before=scores.begin, hooks=scores.hooks), scores

    m0.run(main)
    for outcome, scores in found.values():
        for row, ids in enumerate(outcome.sets()):
            assert ids == rule(scores.rows[row], 8), row
    for ranks, seed in ((2, 0), (4, 1)):
        for chunks, outcome in zip(chunkings, m0.each(chunkings, ranks=ranks, seed=seed), strict=True):
            assert outcome.same(found[chunks][0])


def tied_rows(scores, topk: int = 8) -> int:
    """Rows whose last selected score equals the best unselected one, as fp32 values."""
    ordered = [np.sort(v)[::-1] for v in scores.rows.values() if len(v) > topk]
    return sum(bool(v[topk - 1] == v[topk]) for v in ordered)


def test_4_17_every_kind_of_tie_row(m0) -> None:
    """The matrix rows that data can make: constant rows, rows of zeros, one value in few, a zero plateau, a NaN row, +inf."""
    constant = m0.hidden(1).expand(32, 32).clone()
    few = m0.hidden(3).repeat(11, 1)[:32]
    for name, rows in (("constant", constant), ("few values", few), ("zeros", torch.zeros(32, 32)), ("NaN key", m0.hidden(32))):
        if name == "NaN key":
            rows[3] = torch.nan
        made = m0.geometry(rope="none")
        found, scores = observed(m0, (16, 16), rows, made=made)
        for row, ids in enumerate(found.sets()):
            assert ids == rule(scores.rows[row], 8), (name, row)
        if name in ("constant", "zeros"):
            assert found.sets()[20] == list(range(8)), name
        assert m0.outcome((16, 16), rows, ranks=2, made=made).same(found)
        assert name == "NaN key" or tied_rows(scores) > 0, name


def test_4_17_natural_ties_are_there(m0) -> None:
    """Rows that see 9 to 12 tokens of natural data: some cutoffs are exact ties at zero, so the rule is really used."""
    found = []

    def main(session):
        for seed in range(12):
            found.append(m0.Scores())
            m0.whole(session, (12,), m0.hidden(12, seed=seed), before=found[-1].begin, hooks=found[-1].hooks)

    m0.run(main)
    assert 0 < sum(map(tied_rows, found)) < 12 * 4
