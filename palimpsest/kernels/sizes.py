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


def linear_scratch(depth: int, columns: int, *, resident: bool = False) -> int:
    """Scratch bytes of one tiled projection: fp32 input tile, weight tile (the whole weight when ``resident``) and output tile, 64-aligned."""
    tile = min(columns, COLUMN_TILE)
    return 4 * (ROW_TILE * depth + depth * (columns if resident else tile) + ROW_TILE * tile) + 3 * 64


def tile_scratch(*widths: int, itemsize: int = 4) -> int:
    """Scratch bytes of one tile of ``ROW_TILE`` rows per width, each 64-aligned."""
    return sum(itemsize * ROW_TILE * width + 64 for width in widths)


def norm_scratch(width: int) -> int:
    """Scratch bytes of ``norms.RowNorm``: two fp64 tiles, fp64 weight and bias, two fp64 columns."""
    return tile_scratch(width, width, 1, 1, itemsize=8) + 2 * (8 * width + 64)


def rotation_scratch(dims: int) -> int:
    """Scratch bytes of ``rope.Rotation``: five fp64 tiles of half the rotated dims."""
    return tile_scratch(*[dims // 2] * 5, itemsize=8)


def hadamard_scratch(dim: int) -> int:
    """Scratch bytes of ``hadamard.Hadamard``: one fp64 tile and half of one."""
    return tile_scratch(dim, dim // 2, itemsize=8)


def quantise_scratch(width: int, block: int) -> int:
    """Scratch bytes of ``fp8.Quantiser``: fp32 tile of magnitudes, e4m3 tile, fp32 scale and its exponent bits per block."""
    return tile_scratch(width, width, width // block, width // block)


def decode_scratch(elements: int) -> int:
    """Scratch bytes of ``fp8.Decoder`` for at most ``elements`` codes at once: fp64 and fp32 tables, their codes, int32 indices."""
    return 256 * (1 + 8 + 4) + 4 * elements + 4 * 64
