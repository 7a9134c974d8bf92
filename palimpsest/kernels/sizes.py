"""Tile sizes that contracts and implementations share.

They are constants because they are part of the arithmetic: a row's bits may not depend on a size chosen at run time.
"""

#: query rows of one projection GEMM; shorter groups are padded, so that a row's bits never depend on how many rows came with it
ROW_TILE = 32
#: output columns of one projection GEMM over a weight without heads
COLUMN_TILE = 256
#: history tokens scored at once
KEY_TILE = 4096
#: query rows whose selection state is held at once
SELECT_ROWS = 16
#: attention heads of one attention GEMM; fewer are padded
HEAD_TILE = 8
#: selected records of one attention block, in emitted order
ID_BLOCK = 64
#: bytes of peer staging aimed at; collectives split their traffic into rounds of at most this much
STAGING_BYTES = 8 << 20


def linear_scratch(depth: int, columns: int) -> int:
    """Scratch bytes of one tiled projection: an fp32 input tile, an fp32 weight tile, an fp32 output tile, each 64-aligned."""
    columns = min(columns, COLUMN_TILE)
    return 4 * (ROW_TILE * depth + depth * columns + ROW_TILE * columns) + 3 * 64
