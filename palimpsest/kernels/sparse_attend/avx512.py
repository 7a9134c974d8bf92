"""sparse_attend, ``avx512`` engine: rows on threads, each row's records gathered and attended with VDPBF16PS.

The engine is an order of roundings, and that of VDPBF16PS is the machine's: a seeded row is compared with ``emulate`` when this
file is imported. fp8, fp8_ds_mla and bf16 records under bf16 queries; fp32 records or queries are attended by the portable
engine's file, in its arithmetic.
"""

from collections.abc import Callable

import numpy as np
import torch

from palimpsest.core.errors import Unavailable
from palimpsest.kernels import emulate, sizes
from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.sparse_attend import cpu
from palimpsest.kernels.sparse_attend.avx512_kernel import Work, attend_rows
from palimpsest.kernels.sparse_attend.avx512_records import BF16, Form
from palimpsest.kernels.sparse_attend.compiled import attend_groups, halves, takes


def carve(scratch: Scratch, ids: int, heads: int, kv_lora: int, rope_dims: int) -> Work:
    """Scratch of one thread (``sizes.avx512_attend_scratch``)."""
    width, latent = -(-(kv_lora + rope_dims) // 64) * 64, -(-kv_lora // 64) * 64
    tiles, block = -(-heads // 16), sizes.AMX_ID_BLOCK
    work = Work(
        records=scratch.take((ids,), "i64").numpy().view(np.uint64),
        queries=scratch.take((sizes.avx512_octets(heads), -(-(kv_lora + rope_dims) // 4), 8), "i64").numpy().view(np.uint64),
        wide=halves(scratch, block, width),
        scores=scratch.take((block, 16 * tiles), "fp32").numpy(),
        p=halves(scratch, 16 * tiles, block),
        totals=scratch.take((16 * tiles, latent), "fp32").numpy(),
        state=scratch.take((tiles, 3, 16), "fp32").numpy(),
        staging=scratch.take((128,), "u8").numpy(),
        lines=scratch.take((-(-(kv_lora + rope_dims) // 4),), "i64").numpy().view(np.uint64),
    )
    # past the last head and the last element nothing is ever written, and both sides of a product must be zero there
    work.queries.fill(0)
    work.wide.fill(0)
    return work


def probe_row() -> tuple[np.ndarray, np.ndarray]:
    """Seeded bf16 queries [3, 23] and records [131, 23] whose sums round at every step."""
    drawn = np.random.default_rng(21).standard_normal((3 + 131, 23), np.float32)
    rounded = emulate.to_bf16(drawn)
    return rounded[:3], rounded[3:]


def context_of(query: np.ndarray, records: np.ndarray) -> np.ndarray:
    """What the kernel makes of one row of bf16 values."""
    heads, dim, count, latent = len(query), query.shape[1], len(records), 17
    raw = torch.empty(sizes.avx512_attend_scratch(count, heads, latent, dim - latent) + 64, dtype=torch.uint8)
    work = carve(Scratch(raw[-raw.data_ptr() % 64 :]), count, heads, latent, dim - latent)
    stored = np.ascontiguousarray(records.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    halved = (query.view(np.uint32) >> 16).astype(np.uint16)[None]
    ids, counts = np.arange(count, dtype=np.int32)[None], np.array([count], np.int32)
    context = np.empty((1, heads, latent), np.float32)
    attend_rows(stored, ids, counts, halved, context, Form(BF16, latent, dim - latent, 0.25, 1.0, 0), work)
    return context[0]


def check_roundings(attend: Callable[[np.ndarray, np.ndarray], np.ndarray] = context_of) -> None:
    """Raises Unavailable where the probe row's context is not that of ``emulate``, bit for bit."""
    query, records = probe_row()
    wrong = attend(query, records).view(np.int32) != emulate.avx512_attend(query, records, 17, 0.25, 1.0).view(np.int32)
    if wrong.any():
        raise Unavailable(
            f"engine avx512 does not run here: {wrong.sum()} of {wrong.size} numbers of a probe row differ from avx512-1, so "
            "this machine's VDPBF16PS rounds in another order; choose engine avx or portable"
        )


check_roundings()


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    if takes(call):
        attend_groups(call, chunk, carve, attend_rows)
    else:
        cpu.run(call, chunk)
