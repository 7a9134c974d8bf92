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
    for seed in range(4):
        for found in m0.run(m0.whole, ranks=ranks, seed=seed):
            assert found.same(right)


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
    """Ties are counted from the scores: many in rows just above top-k of a two-head indexer, none where heads or contrast abound."""

    def density(made, length: int, first: int) -> float:
        ties = total = 0
        for seed in range(6):
            scores = m0.Scores()
            m0.run(lambda s, scores=scores, seed=seed: m0.whole(s, (length,), m0.hidden(length, seed=seed), before=scores.begin, hooks=scores.hooks), made=made)
            for row in range(first, length):
                ordered = sorted(scores.rows[row].tolist(), reverse=True)
                ties += ordered[7] == ordered[8]
                total += 1
        return ties / total

    assert density(m0.geometry(index_heads=2), 10, 8) > density(m0.geometry(index_heads=32), 16, 12)
    assert density(m0.geometry(index_heads=32), 16, 12) == 0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows", [16, 13, 3, 1])
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
    for tokens in range(0, 64):
        held = [local_tokens(rank, ranks, 4, tokens) for rank in range(ranks)]
        assert sum(held) == tokens
        assert held == [sum(r.stop - r.start if isinstance(r, range) else r[1] - r[0] for r in token_ranges(rank, ranks, 4, 0, tokens)) for rank in range(ranks)]


def test_two_rank_slices_even_uneven_and_empty(m0) -> None:
    """The matrix row: 8+8, 8+5, 7+0 and four ranks with two of them empty give the ids and bytes of one rank."""
    for rows in (16, 13, 7, 5, 1):
        one = m0.outcome((16, rows))
        for ranks in (2, 4):
            slices = [row_slice(rank, ranks, 16, rows) for rank in range(ranks)]
            assert sum(stop - start for start, stop in slices) == rows
            assert m0.outcome((16, rows), ranks=ranks).same(one)
