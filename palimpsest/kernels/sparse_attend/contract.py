"""Sparse attention of the local heads over the selected records, in the emitted order."""

from typing import Any

from palimpsest.core.contract import OpContract, Operand
from palimpsest.core.units import align_up
from palimpsest.kernels import sizes
from palimpsest.kernels.sizes import HEAD_TILE, ID_BLOCK, decode_scratch


def _scratch(topk: int, heads: int, kv_lora: int, rope_dims: int, format: str, **more: Any) -> int:
    engine, activation = more.get("engine", "portable"), more.get("activation", "fp32")
    if engine in sizes.AMX_ENGINES and sizes.amx_attends(format, activation):
        one = sizes.amx_union_scratch if engine == "amx-union" else sizes.amx_attend_scratch
        return int(more.get("threads", 1)) * one(topk, heads, kv_lora, rope_dims)
    if engine == "avx512" and sizes.amx_attends(format, activation):
        return int(more.get("threads", 1)) * sizes.avx512_attend_scratch(topk, heads, kv_lora, rope_dims)
    dim, ids, padded = kv_lora + rope_dims, align_up(topk, ID_BLOCK), align_up(heads, HEAD_TILE)
    decode = 0 if format in ("bf16", "fp32") else decode_scratch(ID_BLOCK * dim)
    values = 4 * ID_BLOCK * kv_lora if format == "fp8_ds_mla" else 0
    records = ID_BLOCK * dim * (4 + 8) + ids * dim * 4
    logits = padded * (8 * dim + (8 + 4) * ids)
    return decode + values + records + logits + HEAD_TILE * 4 * (3 + kv_lora + ids // ID_BLOCK) + 12 * 64


CONTRACT = OpContract(
    name="sparse_attend",
    summary="p = softmax(scale * query . record); context = sum p * record[:kv_lora], in blocks of ID_BLOCK ids as emitted",
    operands=(
        Operand("ids", "read", "[rows,topk] i32, -1 padded"),
        Operand("counts", "read", "[rows] i32"),
        Operand("latent_history", "read", "[tokens,record] u8"),
        Operand("query", "read", "[rows,heads,kv_lora+rope_dims] bf16|fp32"),
        Operand("context", "write", "[rows,heads,kv_lora] fp32"),
    ),
    params=(
        "topk",
        "heads",
        "kv_lora",
        "rope_dims",
        "format",
        "latent_scale",
        "softmax_scale",
        "activation",
        "engine",
        "threads",
    ),
    scratch=_scratch,
    exact="a (row, head)'s bytes depend on its ids in their order, their records and its query alone",
)
