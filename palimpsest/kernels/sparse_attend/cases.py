"""Hostile cases of sparse_attend: every record format, counts around the block size, empty rows, NaN records, padding that must
not be read.

Byte-exact ones have one selected record, or equal logits (zero queries) over whole numbers. The rest is held to a derived bound.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, one, poison, unit
from palimpsest.kernels.sparse_attend.reference import decode

TOKENS, CAPACITY = 200, 9


def cases() -> Iterator[Case]:
    for kind, latent, rope in (("fp8", 16, 4), ("bf16", 16, 4), ("fp32", 16, 4), ("fp8_ds_mla", 128, 4), ("fp8_ds_mla", 256, 0)):
        for topk, heads, rows in ((8, 4, 9), (64, 1, 5), (130, 9, 4), (65, 16, 0)):
            params = {
                "topk": topk, "heads": heads, "kv_lora": latent, "rope_dims": rope, "format": kind, "latent_scale": 0.5,
                "softmax_scale": 0.3,
            }  # fmt: skip
            name = f"{kind} {latent}+{rope}, top-k {topk}, {heads} heads, {rows} rows"
            yield Case(f"one record, {name}", params, Chunk(50, rows), (_planes(params, rows, "one"),))
            yield Case(f"equal logits, {name}", params, Chunk(50, rows), (_planes(params, rows, "equal"),))
            yield Case(f"random, {name}", params, Chunk(50, rows), (_planes(params, rows, "random"),), _bounder(params))


def _planes(p: dict[str, Any], rows: int, style: str) -> Planes:
    draw, topk, dim = Draw(p["topk"] + p["heads"]), p["topk"], p["kv_lora"] + p["rope_dims"]
    ids = torch.full((CAPACITY, topk), -1, dtype=torch.int32)
    counts = torch.zeros(CAPACITY, dtype=torch.int32)
    for row in range(rows):
        count = 1 if style == "one" else (topk, 0, topk - 1, 1, topk // 2, 3, 2, topk, 1)[row]
        ids[row, :count] = torch.randperm(TOKENS, generator=draw.generator)[:count].sort().values.to(torch.int32)
        counts[row] = count
    ids[rows:], counts[rows:] = 2**30, 2**30
    query = draw.normal((CAPACITY, p["heads"], dim), "bf16")
    if style == "equal":
        query.zero_()
    query[rows:] = torch.nan
    return one(
        ids=ids,
        counts=counts,
        latent_history=records(draw, p, TOKENS),
        query=query,
        context=poison((CAPACITY, p["heads"], p["kv_lora"]), "fp32"),
    )


def records(draw: Draw, p: dict[str, Any], tokens: int) -> torch.Tensor:
    """[tokens, record] u8 of whole and half numbers in any format."""
    latent, kind = p["kv_lora"], p["format"]
    values = draw.integers((tokens, latent + p["rope_dims"]), "fp32", -7, 7) / 2
    if kind == "fp8_ds_mla":
        codes = values[:, :latent].to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.exp2(draw.integers((tokens, latent // 128))).view(torch.uint8)
        return torch.cat([codes, scales, values[:, latent:].to(torch.bfloat16).contiguous().view(torch.uint8)], 1)
    return values.to({"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}[kind]).view(torch.uint8)


def _bounder(p: dict[str, Any]) -> Callable[[Planes], dict[str, torch.Tensor]]:
    def bound(planes: Planes) -> dict[str, torch.Tensor]:
        """Logits agree up to one fp32 rounding of the fp64 dot (2 ulp). With e = |s| 4u + 4u the relative error of a p (logit,
        subtraction, exp), n u the error of a sum of n terms, the quotient is off by at most sum p|v| / sum p times 2 (e + n u) +
        4u."""
        u, out = unit(torch.float32), torch.zeros(planes["context"]["context"].shape, dtype=torch.float64)
        for row in range(CAPACITY):
            count = int(planes["counts"]["counts"][row])
            if not 0 < count <= p["topk"]:
                continue
            taken = planes["ids"]["ids"][row, :count].long()
            values = torch.stack([torch.from_numpy(decode(planes["latent_history"]["latent_history"][i], p)) for i in taken])
            logits = planes["query"]["query"][row].double() @ values.T * p["softmax_scale"]
            weight = logits.softmax(1)
            spread = (logits - logits.amax(1, keepdim=True)).abs().amax() + logits.abs().amax()
            relative = 2 * ((4 * spread + 4) * u + count * u) + 4 * u
            out[row] = relative * (weight @ values[:, : p["kv_lora"]].abs())
        return {"context": out}

    return bound
