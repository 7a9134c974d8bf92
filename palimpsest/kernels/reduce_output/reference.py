"""reduce_output, reference: every rank gets every partial whole, then sums the tree by itself."""

import torch

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import broadcast


def run(call: Call, chunk: Chunk) -> None:
    rows = chunk.rows
    if not rows:
        return
    parts = []
    for rank in range(call.params["ranks"]):
        part = call.view("partial")[:rows].clone()  # [rows, hidden] fp32
        broadcast(call.comm, rank, part, call.name)
        parts.append(part)
    output = call.view("output")  # [rows, hidden]
    output[:rows] = _tree(parts).to(output.dtype)


def _tree(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return _tree(parts[:middle]) + _tree(parts[middle:])
