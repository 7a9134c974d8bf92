"""Hostile cases of bind_inputs: rounding to bf16, no rows, rows past one tile, positions near a million, no rotary table."""

from collections.abc import Iterator

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, one, poison


def cases() -> Iterator[Case]:
    for rows, history, dtype, rope in (
        (0, 0, "bf16", 4),
        (1, 0, "bf16", 4),
        (16, 48, "bf16", 2),
        (33, 1_048_000, "fp32", 64),
        (40, 7, "fp32", 0),
        (40, 0, "bf16", 6),
    ):
        draw = Draw(rows + history)
        planes = one(hidden=poison((40, 24), dtype))
        if rope:
            planes |= one(inv_freq=draw.normal((rope // 2,)).abs(), rope=poison((40, rope // 2, 2), "fp32"))
        chunk = Chunk(history, rows, draw.normal((rows, 24), scale=100.0))
        yield Case(f"{rows} rows at {history}, {dtype}, rope {rope}", {"rope_dims": rope}, chunk, (planes,))
