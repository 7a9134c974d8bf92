"""Hostile cases of attention_query: every rotary layout, no rotary dims, columns past one block, ragged rows, random values by
bound.
"""

from collections.abc import Iterator
from typing import Any

import torch

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, dot_bound, one, poison, unit

CAPACITY = 40


def cases() -> Iterator[Case]:
    for rows, heads, nope, rope, latent, layout, dtype in (
        (0, 2, 8, 4, 16, "half", "bf16"), (1, 1, 8, 4, 16, "interleaved", "bf16"), (33, 3, 6, 2, 260, "half", "fp32"),
        (40, 2, 8, 0, 16, "none", "bf16"), (16, 2, 8, 4, 16, "none", "fp32"),
    ):  # fmt: skip
        draw, params = Draw(rows), _params(12, heads, nope, rope, latent, layout)
        planes = _planes(draw, params, rows, dtype, exact=True)
        yield Case(f"exact, {rows} rows, {layout}, rope {rope}, latent {latent}", params, Chunk(3, rows), (planes,))
    params = _params(24, 4, 8, 4, 16, "interleaved")
    yield Case("random", params, Chunk(0, 35), (_planes(Draw(7), params, 35, "fp32", exact=False),), bound)


def _params(q_lora: int, heads: int, nope: int, rope: int, latent: int, layout: str) -> dict[str, Any]:
    return {"q_lora": q_lora, "heads": heads, "nope": nope, "rope_dims": rope, "kv_lora": latent, "rope_layout": layout}


def _planes(draw: Draw, p: dict[str, Any], rows: int, dtype: str, *, exact: bool) -> Planes:
    make = draw.integers if exact else draw.normal
    source = make((CAPACITY, p["q_lora"]), dtype)
    source[rows:] = torch.nan
    heads, size = p["heads"], p["nope"] + p["rope_dims"]
    planes = one(
        q_latent=source,
        q_b=make((heads * size, p["q_lora"]), dtype),
        uk=make((heads, p["nope"], p["kv_lora"]), dtype),
        query=poison((CAPACITY, heads, p["kv_lora"] + p["rope_dims"]), dtype),
    )
    return planes if p["rope_layout"] == "none" else planes | one(rope=draw.table(CAPACITY, p["rope_dims"] // 2))


def bound(planes: Planes) -> dict[str, torch.Tensor]:
    """Two dots in a row for the absorbed part; for the rotary part the errors of a pair, turned (|cos| + |sin| <= 2), plus
    rounding. Doubled: both sides round, and the second dot sees the first one's error."""
    source, weight, up = planes["q_latent"]["q_latent"], planes["q_b"]["q_b"], planes["uk"]["uk"]
    heads, nope, latent = up.shape
    shape = (source.shape[0], heads, -1)
    q, error = (source.double() @ weight.double().T).view(shape), dot_bound(source, weight).view(shape)
    out = torch.empty(planes["query"]["query"].shape, dtype=torch.float64)
    for head in range(heads):
        first = error[:, head, :nope] @ up[head].double().abs()
        out[:, head, :latent] = 2 * (first + dot_bound(q[:, head, :nope].abs() + error[:, head, :nope], up[head].T))
    rest = 2 * unit(torch.float32) * q[:, :, nope:].abs() + error[:, :, nope:]
    out[:, :, latent:] = 4 * rest.amax(2, keepdim=True)
    return {"query": out}
