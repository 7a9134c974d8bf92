"""sparse_attend, ``amx`` engine: rows on threads, each row's records gathered and attended by AMX tiles.

fp8, fp8_ds_mla and bf16 records under bf16 queries; fp32 records or queries are attended by the portable engine's file, in its
arithmetic.
"""

import math

import numpy as np
import torch

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.sparse_attend import cpu
from palimpsest.kernels.sparse_attend.amx_kernel import BF16, DS_MLA, FP8, Form, Work, attend_rows
from palimpsest.kernels.workers import each

KINDS = {"fp8": FP8, "fp8_ds_mla": DS_MLA, "bf16": BF16}


def carve(scratch: Scratch, ids: int, heads: int, kv_lora: int, rope_dims: int) -> Work:
    """Scratch of one thread (``sizes.amx_attend_scratch``)."""
    width, latent = -(-(kv_lora + rope_dims) // 64) * 64, -(-kv_lora // 64) * 64
    tiles, block = sizes.amx_head_tiles(heads), sizes.AMX_ID_BLOCK
    wide = _halves(scratch, block, width)
    work = Work(
        records=scratch.take((ids,), "i64").numpy().view(np.uint64),
        queries=_halves(scratch, tiles, width // 32, 16, 16, 2),
        wide=wide,
        pairs=_halves(scratch, block * 64),
        scores=scratch.take((block, 16 * tiles), "fp32").numpy(),
        p=_halves(scratch, 16 * tiles, block),
        totals=scratch.take((16 * tiles, latent), "fp32").numpy(),
        state=scratch.take((tiles, 3, 16), "fp32").numpy(),
        staging=scratch.take((128,), "u8").numpy(),
        everyone=wide.reshape(-1)[:0].reshape(0, tiles),
    )
    # past the last head and the last element nothing is ever written, and both sides of a product must be zero there
    work.queries.fill(0)
    work.wide.fill(0)
    return work


def _halves(scratch: Scratch, *shape: int) -> np.ndarray:
    """Scratch of 16-bit words."""
    return scratch.take((*shape[:-1], 2 * shape[-1]), "u8").numpy().view(np.uint16)


class Operands:
    """The arrays and numbers of one call, as the kernels take them. ``lanes``: of one row in a union."""

    def __init__(self, call: Call, lanes: int = 0):
        p = call.params
        stored = p["latent_scale"] if p["format"] == "fp8" else 1.0
        scale = p["softmax_scale"] * stored * math.log2(math.e)
        self.form = Form(KINDS[p["format"]], p["kv_lora"], p["rope_dims"], scale, stored, lanes)
        self.history, self.context = call.view("latent_history").numpy(), call.view("context").numpy()
        self.query = call.view("query").view(torch.int16).numpy().view(np.uint16)
        self.ids, self.counts = call.view("ids").numpy(), call.view("counts").numpy()

    def rows(self, work: Work, rows: slice) -> None:
        """Attend ``rows`` one after the other."""
        attend_rows(self.history, self.ids[rows], self.counts[rows], self.query[rows], self.context[rows], self.form, work)


def takes(call: Call) -> bool:
    """Whether this engine has kernels for the call's records and queries."""
    query = "bf16" if call.view("query").dtype == torch.bfloat16 else "fp32"
    return sizes.amx_attends(call.params["format"], query)


def checked_counts(call: Call, chunk: Chunk) -> None:
    counts, topk = call.view("counts")[: chunk.rows].numpy(), call.params["topk"]
    assert not chunk.rows or (counts.min() >= 0 and counts.max() <= topk), f"{call.name}: a row's count is not within 0..{topk}"


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    if not takes(call):
        cpu.run(call, chunk)
        return
    checked_counts(call, chunk)
    p, operands = call.params, Operands(call)
    call.scratch.reset()
    works = [carve(call.scratch, p["topk"], p["heads"], p["kv_lora"], p["rope_dims"]) for _ in range(p.get("threads", 1))]
    groups = [slice(first, min(first + sizes.ATTEND_ROWS, chunk.rows)) for first in range(0, chunk.rows, sizes.ATTEND_ROWS)]
    each(groups, len(works), lambda thread, rows: operands.rows(works[thread], rows))
