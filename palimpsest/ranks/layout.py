"""Who owns which pages, query rows and heads: plain arithmetic, the same on every rank (stdlib only).

Caches are sharded by page of tokens, round robin; selection is sharded by contiguous slices of the *prepared* rows, so a slice
never moves when fewer rows are active; attention is sharded by contiguous heads. Every token, row and head has exactly one owner.
"""

from collections.abc import Iterator

from palimpsest.core.errors import BadConfig
from palimpsest.core.units import ceil_div


def page_owner(page: int, ranks: int) -> int:
    """The rank that stores global page ``page``."""
    return page % ranks


def local_page(page: int, ranks: int) -> int:
    """Index of global page ``page`` within its owner's cache."""
    return page // ranks


def global_page(rank: int, local: int, ranks: int) -> int:
    """The global page stored as page ``local`` of ``rank``: the inverse of ``(page_owner, local_page)``."""
    return local * ranks + rank


def local_pages(rank: int, ranks: int, pages: int) -> int:
    """How many of the first ``pages`` global pages ``rank`` stores."""
    return max(0, ceil_div(pages - rank, ranks))


def pages_of(rank: int, ranks: int, tokens: int, page: int) -> range:
    """Global pages of ``rank`` that hold any of the first ``tokens`` tokens, ascending. ``page`` is tokens per page."""
    return range(rank, ceil_div(tokens, page), ranks)


def token_ranges(rank: int, ranks: int, start: int, stop: int, *, page: int) -> Iterator[tuple[int, int, int]]:
    """The tokens of ``[start, stop)`` that ``rank`` owns, as ``(first token, end token, row in the owner's cache)``, ascending.

    A range never crosses a page. The third number is ``local_page * page + first % page``: where the first token lives in the
    owner's cache, counted in tokens.
    """
    if start >= stop:
        return
    first_page = start // page
    for index in range(first_page + (rank - first_page) % ranks, ceil_div(stop, page), ranks):
        first, end = max(start, index * page), min(stop, (index + 1) * page)
        yield first, end, local_page(index, ranks) * page + first % page


def local_tokens(rank: int, ranks: int, tokens: int, page: int) -> int:
    """How many of the first ``tokens`` tokens ``rank`` owns (exact: the last page may be partial)."""
    whole, rest = divmod(tokens, page)
    return local_pages(rank, ranks, whole) * page + (rest if rest and page_owner(whole, ranks) == rank else 0)


def slice_rows(ranks: int, rows: int) -> int:
    """``S``: prepared query rows per rank, ``ceil(rows / ranks)``."""
    return ceil_div(rows, ranks)


def row_slice(rank: int, ranks: int, rows: int, active: int) -> tuple[int, int]:
    """Query rows ``[start, stop)`` that ``rank`` selects for: ``[rank * S, (rank + 1) * S)`` clipped to ``active``.

    ``S`` comes from the prepared ``rows``, so with few active rows the last ranks have ``start == stop`` (and still take part in
    every collective).
    """
    size = slice_rows(ranks, rows)
    return min(rank * size, active), min((rank + 1) * size, active)


def head_slice(rank: int, ranks: int, heads: int) -> tuple[int, int]:
    """Attention heads ``[start, stop)`` of ``rank``. Raises BadConfig when the ranks do not divide the heads."""
    if heads % ranks:
        raise BadConfig(f"{heads} attention heads do not split over {ranks} ranks; use a rank count that divides {heads}")
    each = heads // ranks
    return rank * each, (rank + 1) * each


def head_groups(heads: int) -> tuple[int, int]:
    """``(groups, heads per group)`` of the output sum, for the model's total heads.

    ``groups`` is the largest power of two that divides ``heads``: heads add in ascending order inside a group, groups add as a
    binary tree of adjacent pairs, and any power-of-two rank count that divides ``heads`` cuts that tree between whole subtrees.
    """
    if heads < 1:
        raise BadConfig(f"{heads} attention heads; a layer has at least 1")
    groups = heads & -heads
    return groups, heads // groups


def check_ranks(ranks: int, heads: int) -> None:
    """Raise BadConfig unless ``ranks`` is a power of two that divides ``heads`` (the fixed output-sum tree needs both)."""
    if ranks < 1 or ranks & (ranks - 1):
        raise BadConfig(f"{ranks} ranks; the fixed summation tree of the output needs a power of two")
    head_slice(0, ranks, heads)
