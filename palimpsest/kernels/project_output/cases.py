"""Hostile cases of project_output: head counts whose odd part is not 1, subtrees of a larger model, saturated and random gates.

The byte-exact ones pick single elements per head, so that a head's product is exact while the sums over heads must round in
order."""

from collections.abc import Iterator
from typing import Any

import torch

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, dot_bound, one, poison, unit

CAPACITY, LATENT, V = 40, 16, 8


def cases() -> Iterator[Case]:
    for rows, heads, total, hidden, gate in (
        (0, 2, 4, 24, True),
        (1, 4, 4, 24, False),
        (33, 6, 12, 300, True),
        (40, 3, 6, 24, False),
        (5, 8, 8, 24, True),
    ):
        params = {"hidden": hidden, "heads": heads, "total_heads": total, "v_dim": V, "kv_lora": LATENT, "gate": gate}
        yield Case(f"exact, {rows} rows, {heads} of {total} heads", params, Chunk(2, rows), (_exact(params, rows),))
    params = {"hidden": 48, "heads": 12, "total_heads": 12, "v_dim": V, "kv_lora": LATENT, "gate": True}
    yield Case("random", params, Chunk(2, 35), (_random(params, 35),), bound)


def _roles(draw: Draw, p: dict[str, Any], rows: int, tensors: dict[str, torch.Tensor]) -> Planes:
    for role in ("context", "hidden"):
        if role in tensors:
            tensors[role][rows:] = torch.nan
    return one(**tensors, partial=poison((CAPACITY, p["hidden"]), "fp32"))


def _exact(p: dict[str, Any], rows: int) -> Planes:
    draw, heads = Draw(rows), p["heads"]
    tensors = {
        "context": draw.normal((CAPACITY, heads, LATENT), scale=1e3),
        "uv": torch.eye(V, LATENT).repeat(heads, 1, 1),
        "o": torch.zeros(p["hidden"], heads, V),
    }
    for h in range(p["hidden"]):
        tensors["o"][h, :, h % V] = 2.0 ** (h % 5)
    tensors["o"] = tensors["o"].view(p["hidden"], -1)
    if p["gate"]:
        tensors["hidden"] = draw.integers((CAPACITY, p["hidden"]), "bf16", 1, 1)
        gates = torch.zeros(heads * V, p["hidden"])
        gates[::3, 0], gates[1::3, 0] = 200.0, -200.0
        tensors["gate"] = gates
    return _roles(draw, p, rows, tensors)


def _random(p: dict[str, Any], rows: int) -> Planes:
    draw, heads = Draw(3), p["heads"]
    tensors = {
        "context": draw.normal((CAPACITY, heads, LATENT)),
        "hidden": draw.normal((CAPACITY, p["hidden"])),
        "uv": draw.normal((heads, V, LATENT)),
        "gate": draw.normal((heads * V, p["hidden"])),
        "o": draw.normal((p["hidden"], heads * V)),
    }
    return _roles(draw, p, rows, tensors)


def bound(planes: Planes) -> dict[str, torch.Tensor]:
    """Per head: error of v (dot), of the gate (its logit's error times the sigmoid's slope of at most 1/4, and 4 ulp of the
    function), of the product with o; then one rounding per addition over at most ``heads`` partial sums. Doubled for the second
    order."""
    u, context, hidden = unit(torch.float32), planes["context"]["context"], planes["hidden"]["hidden"]
    uv, gate, o = planes["uv"]["uv"], planes["gate"]["gate"], planes["o"]["o"]
    heads = uv.shape[0]
    error = torch.zeros(CAPACITY, o.shape[0], dtype=torch.float64)
    size = torch.zeros_like(error)
    for head in range(heads):
        columns = slice(head * V, (head + 1) * V)
        v, dv = context[:, head].double() @ uv[head].double().T, dot_bound(context[:, head], uv[head])
        dg = dot_bound(hidden, gate[columns]) / 4 + 4 * u
        value = v.abs() + dv
        slack = dv + value * (dg + u)
        weights = o[:, columns].double().abs()
        error += slack @ weights.T + dot_bound(value + slack, o[:, columns])
        size += (value + slack) @ weights.T
    return {"partial": 2 * (error + heads * u * size)}
