"""reduce_output, portable engine."""

import torch

from palimpsest.kernels.call import Call, Chunk
from palimpsest.ranks.layout import row_slice


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. Round by round: my rows of every rank's partial into staging, a binary tree over ranks, one rounding;
    then the finished slices are exchanged in place."""
    comm, ranks = call.comm, call.params["ranks"]
    partial, output = call.view("partial"), call.view("output")
    if ranks == 1:
        output[: chunk.rows].copy_(partial[: chunk.rows])
        return
    slices = [row_slice(rank, ranks, partial.shape[0], chunk.rows) for rank in range(ranks)]
    start, stop = slices[comm.rank]
    staging, hidden = call.view("staging"), partial.shape[1]
    segment = staging.numel() // (ranks * hidden * 4)
    assert segment, f"{call.name}: staging of {staging.numel()} bytes holds no row of {hidden} fp32 per rank"
    parts = staging[: segment * ranks * hidden * 4].view(torch.float32).view(ranks, segment, hidden)
    for offset in range(0, max(end - first for first, end in slices), segment):
        count = min(segment, stop - start - offset)
        sends = [
            (peer, partial[first + offset : min(first + offset + segment, end)])
            for peer, (first, end) in enumerate(slices)
            if peer != comm.rank and first + offset < end
        ]
        receives = [(peer, parts[peer, :count]) for peer in range(ranks) if peer != comm.rank and count > 0]
        comm.exchange(sends, receives, f"{call.name} sum")
        if count > 0:
            rows = slice(start + offset, start + offset + count)
            parts[comm.rank, :count].copy_(partial[rows])
            output[rows].copy_(_tree(parts, ranks, count))
    mine = [(peer, output[start:stop]) for peer in range(ranks) if peer != comm.rank and start < stop]
    theirs = [(peer, output[first:end]) for peer, (first, end) in enumerate(slices) if peer != comm.rank and first < end]
    if mine or theirs:
        comm.exchange(mine, theirs, f"{call.name} share")


def _tree(parts: torch.Tensor, ranks: int, count: int) -> torch.Tensor:
    """``parts`` [ranks, segment, hidden] fp32 summed as a binary tree of adjacent pairs, in place; [count, hidden]."""
    step = 1
    while step < ranks:
        for left in range(0, ranks, 2 * step):
            parts[left, :count].add_(parts[left + step, :count])
        step *= 2
    return parts[0, :count]
