"""Replays of a core for its qualification: other places for the same binaries, other orders, and what a run left behind."""

import copy
import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from palimpsest.core.units import align_up, ceil_div
from palimpsest.ranks.comm import Comm
from palimpsest.ranks.local import run_local
from palimpsest_loader.core import Core
from palimpsest_loader.session import Session
from palimpsest_loader.weights import Weights

T = TypeVar("T")
Tree = dict[str, Any]
#: (history, rows) of one replay
Chunk = tuple[int, int]


def apart(tree: Tree) -> Tree:
    """The same core with bytes of its own for every reusable buffer: no plan, no reuse."""
    made, at = copy.deepcopy(tree), 0
    for name in sorted(made["buffers"]):
        buffer = made["buffers"][name]
        if buffer["kind"] == "reusable":
            buffer["offset"] = at
            at = align_up(at + buffer["nbytes"], made["backing"]["align"])
    made["backing"]["segments"]["reusable"] = at
    return made


def late_first(tree: Tree) -> Tree | None:
    """The core in the wrong order: the late history is gathered before the selection reads the early one. None without two
    histories.
    """
    if len(tree["histories"]) < 2:
        return None
    early, late = tree["histories"]
    made = copy.deepcopy(tree)
    steps = made["steps"]
    writer = next(step for step in steps if late in step["writes"])
    reader = next(at for at, step in enumerate(steps) if early in step["reads"] and step is not writer)
    steps.remove(writer)
    steps.insert(reader, writer)
    return made


def chunks(tree: Tree) -> list[Chunk]:
    """Near the limit, in the middle, shrinking, empty, one row, then the first one three times in a row."""
    tokens, rows = tree["limits"]["tokens"], tree["limits"]["rows"]
    last, middle = tokens - rows, (tokens - rows) // 2
    shrinking = [(middle, count) for count in (rows, max(1, rows // 2), min(3, rows), 0, 1)]
    return [(last, rows), *shrinking, (tokens - 1, 1), (last, rows), (last, rows), (last, rows)]


@dataclass
class Trace:
    """What one rank's replays left: per replay a digest of ids, counts and output; at the end one of the caches."""

    replays: list[str] = field(default_factory=list)
    caches: str = ""


def on_ranks(core: Core, tree: Tree, main: Callable[[Session], T]) -> list[T]:
    """``main(session)`` on every rank of the core in this process, under ``tree``; results in rank order."""

    def body(comm: Comm) -> T:
        torch.set_num_threads(1)
        name = tree["weights"]["files"][comm.rank]
        with Session(tree, Weights(core.path / name, name, tree["weights"]["tensors"]), core.programs, comm) as session:
            return main(session)

    return run_local(int(tree["limits"]["ranks"]), body)


def hidden_rows(tree: Tree, seed: int) -> torch.Tensor:
    """Normal rows [prepared rows, hidden], fp32."""
    plane = tree["buffers"]["hidden"]["planes"][0]
    return torch.randn(tuple(plane["shape"]), generator=torch.Generator().manual_seed(seed))


def selection(tree: Tree, chunk: Chunk) -> dict[str, Any]:
    """The ids a core without an indexer is given: the latest tokens each row sees."""
    if not tree["inputs"]:
        return {}
    topk = tree["buffers"]["ids"]["planes"][0]["shape"][1]
    seen = torch.arange(chunk[0] + 1, chunk[0] + chunk[1] + 1, dtype=torch.int32).unsqueeze(1)
    ids = seen - 1 - torch.arange(topk, dtype=torch.int32)
    return {"ids": ids.clamp(min=-1), "counts": seen[:, 0].clamp(max=topk).to(torch.int32)}


def fill_caches(session: Session, seed: int) -> None:
    """A whole history of real records: the first pages are prefilled, the others repeat them."""
    limits = session.tree["limits"]
    wanted = min(limits["page"] * limits["ranks"] * max(1, 256 // (limits["page"] * limits["ranks"])), limits["tokens"])
    rows, at = hidden_rows(session.tree, seed), 0
    while at < wanted:
        count = min(limits["rows"], wanted - at)
        session.prefill(rows[:count].roll(at, 1), at, **selection(session.tree, (at, count)))
        at += count
    pages = ceil_div(wanted, limits["page"]) // limits["ranks"]
    for name, buffer in session.tree["buffers"].items():
        if buffer["kind"] == "persistent" and pages:
            cache = session.view(name)
            for first in range(pages, cache.shape[0], pages):
                count = min(pages, cache.shape[0] - first)
                cache[first : first + count].copy_(cache[:count])


def digest(*tensors: torch.Tensor) -> str:
    """sha256 of the bytes of contiguous tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor.numel():
            found.update(ctypes.string_at(tensor.contiguous().data_ptr(), tensor.numel() * tensor.element_size()))
    return found.hexdigest()


def trace(session: Session, wanted: Sequence[Chunk], *, seed: int, poison: int | None) -> Trace:
    """Replay ``wanted`` over a filled history. ``poison``: fills what may hold nothing before each replay; not before queued
    ones.
    """
    fill_caches(session, seed)
    rows, found, before = hidden_rows(session.tree, seed + 1), Trace(), None
    for chunk in wanted:
        if poison is not None and chunk != before:
            session.poison(poison)
        out = session.prefill(rows[: chunk[1]], chunk[0], **selection(session.tree, chunk))
        parts = [session.view(name)[: chunk[1]] for name in ("ids", "counts")]
        found.replays.append(digest(out, *parts))
        before = chunk
    caches = [session.raw(n) for n, b in session.tree["buffers"].items() if b["kind"] == "persistent"]
    found.caches = digest(*caches)
    return found
