"""bind_inputs, portable engine."""

import torch

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.linear import row_tiles
from palimpsest.kernels.sizes import ROW_TILE


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. ``chunk.hidden`` is the caller's [rows, hidden]."""
    call.scratch.reset()
    if chunk.rows:
        assert chunk.hidden is not None, "bind_inputs needs the caller's hidden rows"
        call.view("hidden")[: chunk.rows].copy_(chunk.hidden)
    if call.has("rope"):
        _table(call, chunk)


def _table(call: Call, chunk: Chunk) -> None:
    inverse, table = call.view("inv_freq"), call.view("rope")
    half = inverse.shape[0]
    position = call.scratch.take((ROW_TILE, 1), "fp32")
    angle = call.scratch.take((ROW_TILE, half), "fp32")
    wide = call.scratch.take((ROW_TILE, half), "fp64")
    value = call.scratch.take((ROW_TILE, half), "fp64")
    for first, end in row_tiles(0, chunk.rows):
        torch.arange(chunk.history + first, chunk.history + first + ROW_TILE, out=position.view(-1))
        torch.mul(position, inverse, out=angle)
        wide.copy_(angle)
        for part, function in ((0, torch.cos), (1, torch.sin)):
            function(wide, out=value)
            table[first:end, :, part].copy_(value[: end - first])
