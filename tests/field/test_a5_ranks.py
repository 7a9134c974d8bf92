"""Field cases A5: ranks that disagree, and results that differ from run to run."""

import pytest
import torch

from palimpsest.ranks.layout import local_tokens, row_slice, token_ranges


def caches(session) -> dict[str, torch.Tensor]:
    return {name: session.arena.raw(name).clone() for name in ("index_cache", "latent_cache")}


@pytest.mark.parametrize("ranks", [2, 4])
def test_5_01_every_rank_attends_the_same_ids(m0, ranks: int) -> None:
    """5.1 and 5.7: the ids a rank attends are the owner's, byte for byte on all ranks, in every schedule, run after run."""
    right = m0.outcome()
    for seed in range(2):
        for again in m0.run(lambda session: [m0.whole(session) for _ in range(3)], ranks=ranks, seed=seed):
            assert all(found.same(right) for found in again)


def test_5_02_caches_hold_the_same_bytes_whatever_the_ranks(m0) -> None:
    def main(session):
        m0.whole(session)
        return caches(session)

    (one,) = m0.run(main)
    for ranks in (2, 4):
        found = m0.run(main, ranks=ranks)
        for name, whole in one.items():
            pages = whole.view(16, -1)
            for rank, mine in enumerate(found):
                held = mine[name].view(-1, pages.shape[1])
                assert m0.same(held[: len(pages[rank::ranks])], pages[rank::ranks])


def test_5_04_tie_density_is_measured_and_not_claimed(m0) -> None:
    """Ties are counted from the scores: some in rows just above top-k of a two-head indexer, none with 32 heads."""

    def density(heads: int) -> float:
        found = []

        def main(session):
            for seed in range(12):
                found.append(m0.Scores())
                m0.whole(session, (16,), m0.hidden(16, seed=seed), before=found[-1].begin, hooks=found[-1].hooks)

        m0.run(main, made=m0.geometry(index_heads=heads))
        rows = [sorted(scores.rows[row].tolist(), reverse=True) for scores in found for row in range(8, 16)]
        return sum(row[7] == row[8] for row in rows) / len(rows)

    assert density(2) > density(32) == 0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows", [16, 13, 1])
def test_5_05_one_owner_per_row_and_only_ids_travel(m0, ranks: int, rows: int) -> None:
    """Every active row is selected by exactly one rank, and the exchange moves int32 ids and counts, nothing else."""
    selected: list[tuple[int, int]] = []
    sent: list[int] = []

    def tally(run, call, chunk):
        inner = call.comm

        class Counting:
            rank, size = inner.rank, inner.size

            def exchange(self, sends, receives, label):
                sent.extend(t.numel() * t.element_size() for _, t in sends)
                assert {t.dtype for _, t in sends} <= {torch.int32}
                inner.exchange(sends, receives, label)

        call.comm = Counting()
        run(call, chunk)
        call.comm = inner

    def main(session):
        def tap(step, event, data):
            if event == "selected":
                selected.extend((session.comm.rank, row) for row in data["rows"])

        session.comm.barrier("quiet")
        sent.clear()
        session.comm.barrier("count")
        session.prefill(m0.hidden(rows), 20, hooks=m0.Watch(tap=tap))

    m0.run(main, ranks=ranks, more=m0.altered(m0.program(ranks=ranks), "exchange_ids", tally))
    assert sorted(row for _, row in selected) == list(range(rows))
    assert all(row in range(*row_slice(rank, ranks, 16, rows)) for rank, row in selected)
    assert sum(sent) == rows * (8 + 1) * 4 * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_5_08_round_robin_pages_with_chunks_that_do_not_divide(m0, ranks: int) -> None:
    """Chunks of 5 over pages of 4, dealt round robin: positions, bounds and pages are per token, so nothing shows."""
    right = m0.outcome((16, 16, 16))
    assert m0.outcome((5,) * 9 + (3,), ranks=ranks).same(right)
    for tokens in range(64):
        held = [local_tokens(rank, ranks, tokens, 4) for rank in range(ranks)]
        assert sum(held) == tokens
        assert held == [
            sum(stop - start for start, stop, _ in token_ranges(rank, ranks, 0, tokens, page=4)) for rank in range(ranks)
        ]


def test_two_rank_slices_even_uneven_and_empty(m0) -> None:
    """The matrix row: 8+8, 8+5, 7+0 and four ranks with two of them empty give the ids and bytes of one rank."""
    active = (16, 13, 7, 5, 1)
    chunkings = [(16, rows) for rows in active]
    one = m0.each(chunkings)
    for ranks in (2, 4):
        for rows in active:
            assert sum(stop - start for start, stop in (row_slice(rank, ranks, 16, rows) for rank in range(ranks))) == rows
        for found, right in zip(m0.each(chunkings, ranks=ranks), one, strict=True):
            assert found.same(right)
