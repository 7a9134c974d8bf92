"""Sparse attention of the local heads over the selected records, in the emitted order."""

from palimpsest.core.contract import OpContract, Operand
from palimpsest.kernels.sizes import HEAD_TILE, ID_BLOCK


def _scratch(topk: int, heads: int, kv_lora: int, rope_dims: int, **_: object) -> int:
    dim, ids = kv_lora + rope_dims, -(-topk // ID_BLOCK) * ID_BLOCK
    padded = -(-heads // HEAD_TILE) * HEAD_TILE
    records = ID_BLOCK * dim * (4 + 4) + ids * dim * 4 + ID_BLOCK * dim * 8
    return records + padded * (dim * 8 + ids * 20 + kv_lora * 8) + 16 * 64


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
    params=("topk", "heads", "kv_lora", "rope_dims", "format", "latent_scale", "softmax_scale"),
    scratch=_scratch,
    exact="a (row, head)'s bytes depend on its ids in their order, their records and its query alone",
)
