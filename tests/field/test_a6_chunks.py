"""Field cases A6: what goes wrong at the boundary of a chunk."""

import pytest
import torch

from palimpsest.core.errors import CapacityError

STARTS, ROWS = (0, 16, 48), (16, 15, 3, 1, 0)


def test_6_01_a_later_chunk_scores_the_earlier_keys(m0) -> None:
    """Chunk 16..31 selects from tokens 0..15 as well, exactly as rows 16..31 of one chunk of 32 do."""
    found = m0.outcome((16, 16))
    (wide,) = m0.run(lambda session: m0.whole(session, (32,)), rows=32)
    assert found.same(wide)
    assert all(min(ids) < 16 for ids in found.sets()[16:])


def test_6_02_a_chunk_never_reads_behind_its_end(m0) -> None:
    """With a longer earlier request still in the caches behind the chunk, every byte of the result is as if it were not there."""
    right = m0.outcome((16, 16))

    def main(session):
        m0.whole(session, (16, 16, 16, 16), m0.hidden(seed=31))
        return m0.whole(session, (16, 16))

    for ranks in (1, 2):
        assert all(found.same(right) for found in m0.run(main, ranks=ranks))


@pytest.mark.parametrize("formats", ["FP8", "FP32"])
def test_6_04_chunking_does_not_show(m0, formats: str) -> None:
    """Causality, positions and RoPE are per token, so any cut gives the bytes of the plainest one."""
    cuts = [(1,) * 12, (3, 5, 16, 1, 15, 16, 8), (16, 0, 16, 0), (15, 1, 16, 16, 16)]
    found = m0.each([*cuts, *(m0.plain(sum(cut)) for cut in cuts)], formats=getattr(m0, formats))
    assert all(one.same(other) for one, other in zip(found[: len(cuts)], found[len(cuts) :], strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_6_05_every_prepared_token_is_addressable(m0, ranks: int) -> None:
    """The pages of all ranks hold the prepared context, and the very last token can be written, selected and read back."""
    made = m0.program(ranks=ranks)
    assert made.limits.rank_pages * ranks * made.limits.page >= made.limits.tokens

    def main(session):
        seen = []
        look = {
            "sparse_attend": lambda step, call, chunk: seen.append(bool(call.view("latent_history")[chunk.visible - 1].any()))
        }
        found = m0.whole(session, hooks=m0.Watch(before=look))
        return seen, bool(found.output.isfinite().all())

    assert m0.run(main, ranks=ranks) == [([True] * 4, True)] * ranks

    def only_last(step, call, chunk):
        """A key of ones for token 63, zeros before it: the last row must pick it, on whichever rank it lies."""
        keys = call.view("history", "keys").view(torch.uint8)
        if chunk.visible == 64:
            keys.zero_()
            keys[63].fill_(0x38)
            call.view("history", "scales").fill_(1.0)

    def ones(step, call, chunk):
        call.view("index_query").view(torch.uint8).fill_(0x38)
        call.view("head_weights").fill_(1.0)

    def last(session):
        watch = m0.Watch(after={"gather_index": only_last}, before={"index_select": ones})
        return m0.whole(session, hooks=watch).sets()[63]

    assert m0.run(last, ranks=ranks) == [[0, 1, 2, 3, 4, 5, 6, 63]] * ranks


@pytest.mark.parametrize("start", STARTS)
def test_6_07_a_partial_chunk_writes_its_own_records_only(m0, start: int) -> None:
    """1 to 16 rows at every start: cache bytes of other tokens stay what they were."""

    def main(session):
        found = []
        for rows in range(17):
            for name in ("index_cache", "latent_cache"):
                session.arena.raw(name).fill_(0x5A)
            if start:
                m0.whole(session, (16,) * (start // 16))
                for name in ("index_cache", "latent_cache"):
                    pages = session.arena.view(name)
                    pages[start // 4 :].fill_(0x5A)
            before = {name: session.arena.view(name).clone() for name in ("index_cache", "latent_cache")}
            session.prefill(m0.hidden(16)[:rows], start)
            for name, width in (("index_cache", None), ("latent_cache", 20)):
                old, new = before[name], session.arena.view(name)
                touched = (old != new).any(1).nonzero().flatten().tolist()
                found.append(
                    all(start // 4 <= page <= (start + rows - 1) // 4 for page in touched) and (bool(touched) == bool(rows))
                )
                if width and rows % 4:
                    page = (start + rows - 1) // 4
                    found.append(bool((new[page].view(4, width)[rows % 4 :] == old[page].view(4, width)[rows % 4 :]).all()))
        return found

    assert all(m0.run(main)[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_6_08_rows_beyond_the_active_ones_do_no_work(m0, ranks: int) -> None:
    """13 rows in slices for 16: the rows that are missing are neither written into a neighbour's slice nor scored."""
    scored = []

    def main(session):
        watch = m0.Watch(tap=lambda step, event, data: scored.append(data["row"]) if event == "scores" else None)
        return m0.prefill(session, (13,), start=0, hooks=watch)

    right = m0.outcome((13,))
    assert all(found.same(right) for found in m0.run(main, ranks=ranks))
    assert sorted(scored) == list(range(13))


def test_6_10_a_short_chunk_scores_its_own_keys_only(m0) -> None:
    """No bucket: one row over 17 tokens looks at 17 scores, whatever was prepared."""
    scores = m0.Scores()

    def main(session):
        m0.prefill(session, (16,))
        m0.prefill(session, (1,), start=16, before=scores.begin, hooks=scores.hooks)

    m0.run(main)
    assert {row: len(v) for row, v in scores.rows.items()} == {16: 17}


def test_6_11_the_contexts_of_the_matrix_cross_topk(m0) -> None:
    """A set of tests below top-k never selects. Every context of the matrix: ids, counts and bytes on 1, 2 and 4 ranks."""
    contexts = (0, 1, 7, 8, 9, 10, 12, 63, 64)
    assert any(c < 8 for c in contexts)
    assert any(c > 8 for c in contexts)
    whole = m0.outcome()
    for ranks in (1, 2, 4):
        for context, found in zip(contexts, m0.each([(*m0.plain(context), 0) for context in contexts], ranks=ranks), strict=True):
            assert m0.same(found.output, whole.output[:context])
            assert m0.same(found.ids, whole.ids[:context])


@pytest.mark.parametrize("ranks", [1, 2])
def test_starts_and_row_counts_on_one_sealed_plan(m0, ranks: int) -> None:
    """The matrix row: starts 0, 16, 48 with 16, 15, 3, 1, 0, 16 rows on one sealed plan; C is accepted, C + 1 refused."""
    whole = m0.outcome()

    def main(session):
        m0.whole(session)
        for start in STARTS:
            for rows in (*ROWS, 16):
                found = m0.prefill(session, (rows,), start=start)
                assert m0.same(found.output, whole.output[start : start + rows])
            m0.prefill(session, (16,), start=start)
        assert session.prefill(m0.hidden(16), 48).shape == (16, 32)
        with pytest.raises(CapacityError, match=r"65 tokens, 64 are prepared"):
            session.prefill(m0.hidden(16), 49)
        with pytest.raises(CapacityError, match=r"17 rows in one chunk, 16 are prepared"):
            session.prefill(m0.hidden(17), 0)
        return True

    assert all(m0.run(main, ranks=ranks))


def test_tilings_do_not_show(m0) -> None:
    """The matrix row: row tiles of 1, 4, 5 and 16 and the full chunk, on 1 and 2 ranks, give identical ids and bits."""
    whole = m0.outcome()
    tilings = [(tile,) * (64 // tile) + ((64 % tile,) if 64 % tile else ()) for tile in (1, 4, 5, 16)]
    for ranks in (1, 2):
        assert all(found.same(whole) for found in m0.each(tilings, ranks=ranks))
        assert all(found.same(whole) for found in m0.each([(64,), (7, 57)], ranks=ranks, rows=64))
