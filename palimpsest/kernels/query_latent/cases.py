"""Hostile cases of query_latent: no rows, rows past one tile, columns past one block, zero rows, large values, random values by
bound.
"""

from collections.abc import Iterator

import torch

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, dot_bound, one, poison, unit

CAPACITY = 40


def cases() -> Iterator[Case]:
    for rows, hidden, width, dtype in ((0, 24, 16, "bf16"), (1, 24, 16, "bf16"), (33, 20, 300, "fp32"), (40, 8, 17, "bf16")):
        draw = Draw(rows)
        x = draw.integers((CAPACITY, hidden), dtype)
        x[::3] = 0
        x[1::3] *= 1024
        planes = _planes(x, draw.integers((width, hidden), "bf16"), draw.integers((width,), "bf16"), rows, dtype)
        yield Case(f"exact, {rows} rows, {width} columns", _params(hidden, width), Chunk(0, rows), (planes,))
    draw = Draw(99)
    planes = _planes(draw.normal((CAPACITY, 64)), draw.normal((48, 64)), draw.normal((48,)), 35, "fp32")
    yield Case("random", _params(64, 48), Chunk(5, 35), (planes,), bound)


def _params(hidden: int, width: int) -> dict[str, int | float]:
    return {"hidden": hidden, "q_lora": width, "eps": 1e-6}


def _planes(x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, rows: int, dtype: str) -> Planes:
    x[rows:] = torch.nan
    return one(hidden=x, q_a=weight, q_a_norm=norm, q_latent=poison((x.shape[0], weight.shape[0]), dtype))


def bound(planes: Planes) -> dict[str, torch.Tensor]:
    """Error of the projection through the norm: y = x r g with r = 1/rms. |dy| <= (|dx| + |x| |dx|_2 / |x|_2) r g, doubled for
    both sides' roundings and the second order (the relative error of x is far below 1/2)."""
    x, weight = planes["hidden"]["hidden"], planes["q_a"]["q_a"].double()
    exact, error = x.double() @ weight.T, dot_bound(x, planes["q_a"]["q_a"])
    norm = exact.square().mean(1, keepdim=True).sqrt()
    relative = error.norm(dim=1, keepdim=True) / exact.norm(dim=1, keepdim=True)
    gain = planes["q_a_norm"]["q_a_norm"].double().abs()
    value = exact.abs() / norm * gain
    return {"q_latent": 2 * (error / norm * gain + value * (relative + 2 * unit(torch.float32)))}
