"""Hostile cases of gather_history: partial last pages, ranks without pages, staging of one page per rank, both kinds of
planes.
"""

from collections.abc import Iterator

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, poison

PAGE, TOKENS = 4, 64


def cases() -> Iterator[Case]:
    for ranks in (1, 2, 4):
        for history, rows in ((0, 0), (0, 1), (3, 1), (5, 0), (16, 16), (48, 15), (63, 1)):
            for record, room in (("8+4", 1), ("8+4", 3), ("20", 1), ("32", 100)):
                yield _case(ranks, history, rows, record, room)


def _case(ranks: int, history: int, rows: int, record: str, room: int) -> Case:
    """``room``: pages of every rank that staging holds."""
    widths = [int(width) for width in record.split("+")]
    size = PAGE * sum(widths)
    planes: list[Planes] = []
    for rank in range(ranks):
        history_planes = {"keys": poison((TOKENS, widths[0]), "u8")}
        if len(widths) > 1:
            history_planes = {"keys": poison((TOKENS, widths[0]), "e4m3"), "scales": poison((TOKENS,), "fp32")}
        planes.append({
            "cache": {"cache": Draw(rank).bytes(-(-TOKENS // PAGE // ranks), size)},
            "staging": {"staging": poison((ranks * room * size + 5,), "u8")},
            "history": history_planes,
        })  # fmt: skip
    params = {"record": record, "page": PAGE, "ranks": ranks}
    return Case(f"{record} of {history}+{rows} tokens, {ranks} ranks, {room} pages", params, Chunk(history, rows), tuple(planes))
