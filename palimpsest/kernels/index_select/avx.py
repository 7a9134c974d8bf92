"""index_select, ``avx`` engine: groups of rows on threads, each group streaming the keys once through vectorised loops and an
exact top-k.

fp8 records; fp32 records are selected by the portable engine's file, in its arithmetic.
"""

import torch

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.index_select import cpu
from palimpsest.kernels.index_select.avx_kernel import RUN, Group, begin, emit, pass_tiles
from palimpsest.kernels.index_select.streaming import Kernels, select


def _table(scratch: Scratch) -> torch.Tensor:
    """Values of the 256 codes."""
    codes = scratch.take((256,), "u8")
    torch.arange(256, out=codes)
    return scratch.take((256,), "fp32").copy_(codes.view(torch.float8_e4m3fn))


def _group(call: Call) -> Group:
    """Scratch of one thread (``sizes.avx_select_scratch``)."""
    scratch, topk, heads, dim = call.scratch, call.params["topk"], call.params["heads"], call.params["dim"]
    rows, tile, width = sizes.avx_select_rows(topk, heads, dim), sizes.AMX_KEY_TILE, sizes.avx_dim(dim)
    padded, capacity = sizes.avx_heads(heads), sizes.fast_capacity(topk)
    return Group(
        table=_table(scratch).numpy(),
        wide=scratch.take((rows, padded, width), "fp32").numpy(),
        weights=scratch.take((rows, padded), "fp32").numpy(),
        columns=scratch.take((tile // RUN, width, RUN), "fp32").numpy(),
        scores=scratch.take((sizes.SELECT_ROWS, tile), "fp32").numpy(),
        sums=scratch.take((4, RUN), "fp32").numpy(),
        line=scratch.take((tile,), "i32").numpy(),
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
    if call.params["format"] == "fp8":
        select(call, chunk, KERNELS)
    else:
        cpu.run(call, chunk)
