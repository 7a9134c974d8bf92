"""index_select, ``amx`` engine: groups of rows on threads, each group streaming the keys once through AMX tiles and an exact
top-k.

fp8 records of at most 128 dims; other records are selected by the portable engine's file, in its arithmetic.
"""

import numpy as np

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.index_select import cpu
from palimpsest.kernels.index_select.amx_kernel import Group, begin, emit, pass_tiles
from palimpsest.kernels.index_select.streaming import Kernels, select


def _group(call: Call) -> Group:
    """Scratch of one thread (``sizes.amx_select_scratch``)."""
    scratch, topk, heads, dim = call.scratch, call.params["topk"], call.params["heads"], call.params["dim"]
    rows, tile, width = sizes.amx_select_rows(topk, heads, dim), sizes.AMX_KEY_TILE, sizes.amx_dim(dim)
    padded, capacity = sizes.amx_heads(heads), sizes.fast_capacity(topk)
    return Group(
        wide=scratch.take((rows, padded, 2 * width), "u8").numpy().view(np.uint16),
        weights=scratch.take((rows, padded), "fp32").numpy(),
        packed=scratch.take((tile * 2 * width,), "u8").numpy().view(np.uint16),
        tail=scratch.take((16, width), "u8").numpy(),
        scales=scratch.take((tile,), "fp32").numpy(),
        scores=scratch.take((sizes.SELECT_ROWS, tile), "fp32").numpy(),
        sums=scratch.take((32,), "fp32").numpy(),
        dots=scratch.take((2048,), "fp32").numpy(),
        candidates=scratch.take((rows, capacity), "i32").numpy(),
        ids=scratch.take((rows, capacity), "i32").numpy(),
        held=scratch.take((rows,), "i64").numpy(),
        least=scratch.take((rows,), "i32").numpy(),
        seen=scratch.take((rows,), "i64").numpy(),
        work=scratch.take((4 * capacity,), "i32").numpy(),
        sample=scratch.take((16,), "i32").numpy(),
        topk=topk,
    )


KERNELS = Kernels(_group, begin, pass_tiles, emit)


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    if sizes.amx_selects(call.params["format"], call.params["dim"]):
        select(call, chunk, KERNELS)
    else:
        cpu.run(call, chunk)
