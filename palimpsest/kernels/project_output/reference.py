"""project_output, reference: head products exact to fp64 and rounded once, sums in fp32 in the contract's order."""

import numpy as np

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import Array, fp32, project, store, wide


def run(call: Call, chunk: Chunk) -> None:
    p, rows = call.params, chunk.rows
    if not rows:
        return
    each = p["total_heads"]
    while each % 2 == 0:
        each //= 2  # heads per group: the odd part of the model's head count
    groups = []
    for first in range(0, p["heads"], each):
        total = _head(call, first, rows)
        for head in range(first + 1, first + each):
            total = fp32(total + _head(call, head, rows))
        groups.append(total)
    store(call.view("partial")[:rows], tree(groups))


def _head(call: Call, head: int, rows: int) -> Array:
    """[rows, hidden] fp32-valued"""
    v = call.params["v_dim"]
    value = project(wide(call.view("context")[:rows, head]), call.view("uv")[head])  # [rows, v]
    if call.params["gate"]:
        logits = project(wide(call.view("hidden")[:rows]), call.view("gate")[head * v : (head + 1) * v])  # [rows, v]
        with np.errstate(over="ignore"):
            value = fp32(value * fp32(1.0 / (1.0 + np.exp(-logits))))
    return project(value, call.view("o")[:, head * v : (head + 1) * v])


def tree(parts: list[Array]) -> Array:
    """fp32 sum of a power of two of arrays: left half plus right half, all the way down."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return fp32(tree(parts[:middle]) + tree(parts[middle:]))
