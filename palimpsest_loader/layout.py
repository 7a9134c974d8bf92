"""Who owns which pages and rows: the arithmetic of docs/format.md, the same on every rank."""

from collections.abc import Iterator


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def row_slice(rank: int, ranks: int, rows: int, active: int) -> tuple[int, int]:
    """Rows [start, stop) that ``rank`` selects for, out of ``rows`` prepared and ``active`` used ones."""
    size = ceil_div(rows, ranks)
    return min(rank * size, active), min((rank + 1) * size, active)


def local_pages(rank: int, ranks: int, pages: int) -> int:
    """How many of the first ``pages`` pages ``rank`` stores: page p lies on rank p mod ranks."""
    return max(0, ceil_div(pages - rank, ranks))


def token_ranges(rank: int, ranks: int, start: int, stop: int, page: int) -> Iterator[tuple[int, int, int, int]]:
    """The tokens of [start, stop) that ``rank`` stores: (first, end, local page, place in the page), never across pages."""
    if start >= stop:
        return
    head = start // page
    for index in range(head + (rank - head) % ranks, ceil_div(stop, page), ranks):
        first, end = max(start, index * page), min(stop, (index + 1) * page)
        yield first, end, index // ranks, first % page


def tiles(count: int, tile: int, room: int) -> Iterator[int]:
    """Starts of tiles of ``tile`` rows that cover [0, count) and stay inside ``room`` rows: the last one may begin earlier."""
    for at in range(0, count, tile):
        yield min(at, room - tile)
