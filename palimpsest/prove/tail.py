"""The recorded tail: a replay's own steps run again on private storage.

Same implementations, same weights, other memory: latent records come from the persistent caches of all ranks by way of a file,
ids keep their emitted order, and nothing planned is read or written except the weights.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.prove.capture import Bytes, Observation
from palimpsest.run.execute import Session


def tensor(raw: Bytes, like: torch.Tensor, rows: int) -> torch.Tensor:
    """Private bytes as a tensor of ``like``'s dtype and trailing shape, with ``rows`` first."""
    return torch.from_numpy(np.ascontiguousarray(raw).reshape(-1)).view(like.dtype).view(rows, *like.shape[1:])


class Tail:
    """Runs single steps of a session on private operands."""

    def __init__(self, session: Session):
        self.session = session
        self._bound = {bound.step.name: bound for bound in session.bound}
        self._scratch: dict[str, torch.Tensor] = {}

    def step(self, name: str, chunk: Chunk, operands: Mapping[str, torch.Tensor]) -> None:
        """Run step ``name`` with some one-plane roles replaced; the others are read where they are planned (weights, tables)."""
        bound = self._bound[name]
        if name not in self._scratch:
            self._scratch[name] = torch.empty(bound.step.scratch, dtype=torch.uint8)
        views: dict[str, Mapping[str, torch.Tensor]] = dict(bound.call.views)
        kinds = {b.name: b.kind for b in self.session.program.all_buffers}
        for role, buffer in (*bound.step.reads, *bound.step.writes, *bound.step.updates):
            if role in operands:
                views[role] = {buffer: operands[role]}
            else:
                assert kinds[buffer] in ("weights", "table"), f"tail of {name} would touch the planned {buffer}"
        call = Call(
            name=name, params=bound.call.params, views=views, raws={}, scratch=Scratch(self._scratch[name]), comm=bound.call.comm
        )
        with torch.no_grad():
            bound.run(call, chunk)

    def view(self, buffer: str) -> torch.Tensor:
        """The planned view, for its dtype and shape only."""
        return self.session.arena.view(buffer)

    def attend(self, o: Observation, ids: NDArray[np.int32], counts: NDArray[np.int32], rows: NDArray[np.int64]) -> Bytes:
        """Context bytes [n, bytes] of chunk rows ``rows``, given their ids [n, topk] in emitted order."""
        n, query, context = len(rows), self.view("query"), self.view("context")
        out = torch.empty((n, *context.shape[1:]), dtype=context.dtype)
        operands = {
            "ids": torch.from_numpy(np.ascontiguousarray(ids)), "counts": torch.from_numpy(np.ascontiguousarray(counts)),
            "latent_history": torch.from_numpy(o.latents), "query": tensor(o.copies["query"][rows], query, n), "context": out,
        }  # fmt: skip
        self.step("sparse_attend", Chunk(o.history, n), operands)
        return out.view(n, -1).view(torch.uint8).numpy()

    def project(self, o: Observation, context: Bytes, rows: NDArray[np.int64]) -> Bytes:
        """Partial output bytes [n, bytes] of chunk rows ``rows`` from their context."""
        n, planned, hidden = len(rows), self.view("context"), self.view("hidden")
        out = torch.empty((n, *self.view("partial").shape[1:]), dtype=torch.float32)
        operands = {"context": tensor(context, planned, n), "partial": out}
        if any(role == "hidden" for role, _ in self._bound["project_output"].step.reads):
            operands["hidden"] = tensor(o.copies["hidden"][rows], hidden, n)
        self.step("project_output", Chunk(o.history, n), operands)
        return out.view(torch.uint8).numpy()

    def append(self, o: Observation, hidden: torch.Tensor) -> dict[str, dict[int, Bytes]]:
        """What appending the caller's ``hidden`` rows writes: cache -> local page -> its bytes, on pages that start as zeros."""
        private: dict[str, torch.Tensor] = {
            "hidden": torch.empty((o.rows, *self.view("hidden").shape[1:]), dtype=self.view("hidden").dtype)
        }
        bind = self._bound["bind_inputs"].step
        if any(role == "rope" for role, _ in bind.writes):
            private["rope"] = torch.empty((o.rows, *self.view("rope").shape[1:]), dtype=torch.float32)
        self.step("bind_inputs", Chunk(o.history, o.rows, hidden), private)
        made: dict[str, dict[int, Bytes]] = {}
        for name, cache in (("append_index", "index_cache"), ("append_latent", "latent_cache")):
            pages = torch.zeros(self.view(cache).shape, dtype=torch.uint8)
            roles = dict(self._bound[name].step.reads)
            operands = {role: t for role, t in private.items() if role in roles} | {cache: pages}
            self.step(name, Chunk(o.history, o.rows), operands)
            # copies: a view would keep every page of the cache
            made[cache] = {page: pages[page].numpy().copy() for page in o.appended.get(cache, {})}
        return made


def tree_sum(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The sum over ranks as a binary tree of adjacent pairs, in fp32: the order is part of the contract."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def as_activation(values: NDArray[np.float32], dtype: Any) -> Bytes:
    """fp32 rows rounded once to the activation dtype, as bytes [rows, bytes]."""
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    return rounded.view(torch.uint8).numpy() if rounded.numel() else np.empty((len(values), 0), np.uint8)
