"""sparse_attend, ``amx`` engine: rows on threads, each row's records gathered and attended by AMX tiles.

fp8, fp8_ds_mla and bf16 records under bf16 queries; fp32 records or queries are attended by the portable engine's file, in its
arithmetic.
"""

import numpy as np

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.sparse_attend import cpu
from palimpsest.kernels.sparse_attend.amx_kernel import Work, attend_rows
from palimpsest.kernels.sparse_attend.compiled import attend_groups, halves, takes


def carve(scratch: Scratch, ids: int, heads: int, kv_lora: int, rope_dims: int) -> Work:
    """Scratch of one thread (``sizes.amx_attend_scratch``)."""
    width, latent = -(-(kv_lora + rope_dims) // 64) * 64, -(-kv_lora // 64) * 64
    tiles, block = sizes.amx_head_tiles(heads), sizes.AMX_ID_BLOCK
    wide = halves(scratch, block, width)
    work = Work(
        records=scratch.take((ids,), "i64").numpy().view(np.uint64),
        queries=halves(scratch, tiles, width // 32, 16, 16, 2),
        wide=wide,
        pairs=halves(scratch, block * 64),
        scores=scratch.take((block, 16 * tiles), "fp32").numpy(),
        p=halves(scratch, 16 * tiles, block),
        totals=scratch.take((16 * tiles, latent), "fp32").numpy(),
        state=scratch.take((tiles, 3, 16), "fp32").numpy(),
        staging=scratch.take((128,), "u8").numpy(),
        everyone=wide.reshape(-1)[:0].reshape(0, tiles),
    )
    # past the last head and the last element nothing is ever written, and both sides of a product must be zero there
    work.queries.fill(0)
    work.wide.fill(0)
    return work


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    if takes(call):
        attend_groups(call, chunk, carve, attend_rows)
    else:
        cpu.run(call, chunk)
