"""project_output, portable engine.

Heads of one group add in ascending order; groups add as a binary tree of adjacent pairs. A rank holds whole groups, so its
partial is a subtree of the model's tree and ``reduce_output`` continues it."""

from collections.abc import Mapping
from typing import Any

import torch

from palimpsest.kernels import linear
from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.linear import Gemm, make_projection, row_tiles
from palimpsest.kernels.sizes import ROW_TILE
from palimpsest.ranks.layout import head_groups


def gemms(params: Mapping[str, Any]) -> list[Gemm]:
    shapes = linear.gemms(params["kv_lora"], params["v_dim"]) + linear.gemms(params["v_dim"], params["hidden"])
    return shapes + (linear.gemms(params["hidden"], params["v_dim"]) if params["gate"] else [])


class _Heads:
    """Scratch and the value path of one head."""

    def __init__(self, call: Call):
        scratch, p = call.scratch, call.params
        self.call, self.v_dim = call, p["v_dim"]
        self.value = make_projection(call, call.view("uv"), p["kv_lora"], p["v_dim"])
        self.out = make_projection(call, call.view("o"), p["v_dim"], p["hidden"])
        self.gate = make_projection(call, call.view("gate"), p["hidden"], p["v_dim"]) if p["gate"] else None
        self.v = scratch.take((ROW_TILE, p["v_dim"]), "fp32")
        self.g = scratch.take((ROW_TILE, p["v_dim"]), "fp32")

    def project(self, head: int, first: int, end: int, out: torch.Tensor) -> None:
        """``out`` [ROW_TILE, hidden] fp32 = gated value of ``head`` times its columns of ``o``, rows [first, end)."""
        view, columns = self.call.view, slice(head * self.v_dim, (head + 1) * self.v_dim)
        self.value.project(view("context")[first:end, head], view("uv")[head], self.v)
        if self.gate:
            self.gate.project(view("hidden")[first:end], view("gate")[columns], self.g)
            self.v.mul_(self.g.sigmoid_())
        self.out.project(self.v, view("o")[:, columns], out)


def run(call: Call, chunk: Chunk) -> None:
    """See the contract."""
    scratch, p = call.scratch, call.params
    scratch.reset()
    _, each = head_groups(p["total_heads"])
    local = p["heads"] // each
    assert local * each == p["heads"], f"{call.name}: {p['heads']} heads are no subtree of {p['total_heads']}"
    heads = _Heads(call)
    one = scratch.take((ROW_TILE, p["hidden"]), "fp32")
    stack = _stack(scratch, local, p["hidden"])
    for first, end in row_tiles(0, chunk.rows):
        depth = 0
        for group in range(local):
            total = stack[depth]
            for head in range(group * each, (group + 1) * each):
                heads.project(head, first, end, total if head == group * each else one)
                if head > group * each:
                    total.add_(one)
            depth += 1
            # as in binary counting: each trailing one bit of the group's number closes a pair
            pairs = group
            while pairs & 1:
                depth -= 1
                stack[depth - 1].add_(stack[depth])
                pairs >>= 1
        call.view("partial")[first:end].copy_(stack[0][: end - first])


def _stack(scratch: Scratch, groups: int, hidden: int) -> list[torch.Tensor]:
    """Open subtrees: at most one per level, and the group being summed."""
    return [scratch.take((ROW_TILE, hidden), "fp32") for _ in range(groups.bit_length())]
