"""Ownership: every page, token, row and head has exactly one owner, and the local index is a bijection."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palimpsest.core.errors import BadConfig
from palimpsest.ranks import layout

RANKS = st.integers(1, 33)


@given(ranks=RANKS, page=st.integers(0, 10_000))
def test_pages_are_numbered_densely_on_their_owner(ranks: int, page: int) -> None:
    owner, local = layout.page_owner(page, ranks), layout.local_page(page, ranks)
    assert 0 <= owner < ranks
    assert layout.global_page(owner, local, ranks) == page
    assert local == 0 or layout.page_owner(layout.global_page(owner, local - 1, ranks), ranks) == owner


@given(ranks=RANKS, tokens=st.integers(0, 2000), page=st.sampled_from([1, 3, 16, 64]))
def test_pages_of_covers_every_page_once(ranks: int, tokens: int, page: int) -> None:
    mine = [list(layout.pages_of(rank, ranks, tokens, page)) for rank in range(ranks)]
    assert sorted(page for pages in mine for page in pages) == list(range(-(-tokens // page)))
    assert [len(pages) for pages in mine] == [layout.local_pages(rank, ranks, -(-tokens // page)) for rank in range(ranks)]


@given(ranks=RANKS, start=st.integers(0, 700), count=st.integers(0, 700), page=st.sampled_from([1, 3, 16, 64]))
def test_token_ranges_cover_once_and_agree_with_a_token_at_a_time(ranks: int, start: int, count: int, page: int) -> None:
    seen: dict[int, tuple[int, int]] = {}
    for rank in range(ranks):
        previous = -1
        for first, end, row in layout.token_ranges(rank, ranks, start, start + count, page=page):
            assert previous <= first < end
            assert first // page == (end - 1) // page
            previous = end
            for token in range(first, end):
                assert token not in seen
                seen[token] = (rank, row + token - first)
    expected = {t: (t // page % ranks, t // page // ranks * page + t % page) for t in range(start, start + count)}
    assert seen == expected


@given(ranks=RANKS, tokens=st.integers(0, 2000), page=st.sampled_from([1, 3, 16, 64]))
def test_local_tokens_counts_what_token_ranges_yields(ranks: int, tokens: int, page: int) -> None:
    for rank in range(ranks):
        ranges = layout.token_ranges(rank, ranks, 0, tokens, page=page)
        assert layout.local_tokens(rank, ranks, tokens, page) == sum(end - first for first, end, _ in ranges)


@given(ranks=RANKS, rows=st.integers(0, 500), data=st.data())
def test_row_slices_tile_the_active_rows_and_never_move(ranks: int, rows: int, data: st.DataObject) -> None:
    active = data.draw(st.integers(0, rows))
    slices = [layout.row_slice(rank, ranks, rows, active) for rank in range(ranks)]
    assert [row for start, stop in slices for row in range(start, stop)] == list(range(active))
    for rank, (start, stop) in enumerate(slices):
        assert start <= stop
        if start < stop:
            assert start == rank * layout.slice_rows(ranks, rows)


def test_few_active_rows_leave_the_last_ranks_without_rows() -> None:
    """Case C05 of the qualifier: 4096 prepared rows, 2305 active, 16 ranks."""
    sizes = [stop - start for start, stop in (layout.row_slice(rank, 16, 4096, 2305) for rank in range(16))]
    assert sizes == [256] * 9 + [1] + [0] * 6


@given(groups=st.sampled_from([1, 2, 4, 8, 16]), each=st.integers(1, 9))
def test_heads_are_split_into_equal_slices(groups: int, each: int) -> None:
    heads = groups * each
    slices = [layout.head_slice(rank, groups, heads) for rank in range(groups)]
    assert [head for start, stop in slices for head in range(start, stop)] == list(range(heads))
    found, size = layout.head_groups(heads)
    assert found * size == heads
    assert found & (found - 1) == 0
    assert size % 2 == 1
    layout.check_ranks(groups, heads)


@pytest.mark.parametrize(("ranks", "heads"), [(3, 6), (0, 4), (8, 12), (-2, 4)])
def test_impossible_rank_counts_are_refused(ranks: int, heads: int) -> None:
    with pytest.raises(BadConfig, match=str(abs(ranks))):
        layout.check_ranks(ranks, heads)


def test_layout_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, palimpsest.ranks.layout; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
