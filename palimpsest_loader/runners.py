"""The loops that drive compiled programs, and the steps that are communication: one function per ``runner`` of docs/format.md."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from palimpsest_loader.calls import Pass
from palimpsest_loader.comm import Comm
from palimpsest_loader.layout import ceil_div, local_pages, row_slice, tiles, token_ranges


@dataclass(frozen=True)
class Chunk:
    """One prefill call: ``rows`` new tokens after ``history`` cached ones; ``hidden`` [rows, width]."""

    history: int
    rows: int
    hidden: torch.Tensor

    @property
    def visible(self) -> int:
        return self.history + self.rows


@dataclass(frozen=True)
class Step:
    """One step bound to memory: its passes, the small tensors the runner fills, and the buffers it touches itself."""

    name: str
    phase: str
    numbers: dict[str, int]
    passes: list[Pass]
    control: dict[str, torch.Tensor]
    views: dict[str, torch.Tensor]
    raws: dict[str, torch.Tensor]
    planes: list[dict[str, int]]
    limits: dict[str, int]
    comm: Comm


Runner = Callable[[Step, Chunk], None]


def bind_input(step: Step, chunk: Chunk) -> None:
    """Copy the hidden rows in; then the rotary table, tile by tile."""
    step.views["hidden"][: chunk.rows].copy_(chunk.hidden)
    for one in step.passes:
        for row in tiles(chunk.rows, step.numbers["tile"], step.limits["rows"]):
            first = chunk.history + row
            torch.arange(first, first + step.numbers["tile"], out=step.control["positions"])
            one.run({"row": row})


def rows(step: Step, chunk: Chunk) -> None:
    """The passes over tiles of active rows, tiles of this rank's slice, or heads. All share their outermost loop and run in
    order inside it.

    A last tile may begin earlier and compute rows again. So what a step adds up over heads begins anew with every tile.
    """
    for values in _axis(step, chunk, step.passes[0].loops[0], {}):
        if "clear" in step.views:
            step.views["clear"][values["row"] : values["row"] + step.numbers["tile"]].zero_()
        for one in step.passes:
            _nest(step, chunk, one, 1, values)


def _nest(step: Step, chunk: Chunk, one: Pass, depth: int, values: dict[str, int]) -> None:
    if depth == len(one.loops):
        one.run(values)
        return
    for inner in _axis(step, chunk, one.loops[depth], values):
        _nest(step, chunk, one, depth + 1, inner)


def _axis(step: Step, chunk: Chunk, axis: str, values: dict[str, int]) -> Iterator[dict[str, int]]:
    """``values`` with every value of one more axis; a slot comes with its row."""
    if axis == "head":
        for head in range(step.numbers["heads"]):
            yield values | {"head": head}
    elif axis == "row":
        for row in tiles(chunk.rows, step.numbers["tile"], step.limits["rows"]):
            yield values | {"row": row}
    else:
        start, count, room = _slice(step, chunk)
        for slot in tiles(count, step.numbers["tile"], room):
            yield values | {"slot": slot, "row": start + slot}


def _slice(step: Step, chunk: Chunk) -> tuple[int, int, int]:
    """First row of this rank's slice, active rows in it, prepared rows in it."""
    ranks, prepared = step.limits["ranks"], step.limits["rows"]
    start, stop = row_slice(step.comm.rank, ranks, prepared, chunk.rows)
    return step.comm.rank * ceil_div(prepared, ranks), stop - start, ceil_div(prepared, ranks)


def append(step: Step, chunk: Chunk) -> None:
    """Records of this rank's new tokens: a tile at a time into scratch, then byte for byte into their page."""
    (one,), tile, limits = step.passes, step.numbers["tile"], step.limits
    cache, scratch = step.views["cache"], step.raws["tile"]
    for first, end, page, place in token_ranges(step.comm.rank, limits["ranks"], chunk.history, chunk.visible, limits["page"]):
        for token in range(first, end, tile):
            count, row = min(tile, end - token), token - chunk.history
            start = min(row, limits["rows"] - tile)
            one.run({"row": start})
            for plane in step.planes:
                width, at = plane["width"], plane["tile"] + (row - start) * plane["width"]
                source = scratch[at : at + count * width].view(count, width)
                to = plane["page"] + (place + token - first) * plane["pitch"]
                cache[page].as_strided((count, width), (plane["pitch"], 1), cache[page].storage_offset() + to).copy_(source)


def gather(step: Step, chunk: Chunk) -> None:
    """The whole history from the pages of all ranks, in rounds through staging; whole pages, the last one included."""
    (one,), comm, ranks = step.passes, step.comm, step.limits["ranks"]
    cache, staging = step.views["cache"], step.raws["staging"]
    pages, size = ceil_div(chunk.visible, step.limits["page"]), cache.shape[1]
    mine = local_pages(comm.rank, ranks, pages)
    _scatter(one, cache[:mine], comm.rank, 0, ranks)
    peers = [rank for rank in range(ranks) if rank != comm.rank]
    segment = staging.numel() // (ranks * size)
    for first in range(0, local_pages(0, ranks, pages) if peers else 0, max(1, segment)):
        count = min(segment, mine - first)
        sends = [(peer, cache[first : first + count]) for peer in peers] if count > 0 else []
        receives = []
        for peer in peers:
            count = min(segment, local_pages(peer, ranks, pages) - first)
            if count > 0:
                at = peer * segment * size
                receives.append((peer, staging[at : at + count * size].view(count, size)))
        comm.exchange(sends, receives, step.name)
        for peer, received in receives:
            _scatter(one, received, peer, first, ranks)


def _scatter(one: Pass, pages: torch.Tensor, owner: int, first: int, ranks: int) -> None:
    if pages.shape[0]:
        values = {"place": owner + first * ranks}
        one.call([pages, *(argument.pages(pages.shape[0], values) for argument in one.args[1:])])


def select(step: Step, chunk: Chunk) -> None:
    """Scores of a few rows against every key tile they see, then their ids. Rows of a tile that are not active see nothing."""
    (scored, emit), tile, keys = step.passes, step.numbers["tile"], step.numbers["keys"]
    seen, start, tokens = step.control["seen"], step.control["start"], step.limits["tokens"]
    first, count, room = _slice(step, chunk)
    for slot in tiles(count, tile, room):
        row = first + slot
        torch.arange(chunk.history + row + 1, chunk.history + row + 1 + tile, out=seen)
        seen[count - slot :].zero_()
        for key in range(0, chunk.history + min(row + tile, first + count), keys):
            view = min(key, tokens - keys)
            start[0], start[1] = view, key
            scored.run({"row": row, "slot": slot, "key": view})
        emit.run({"row": row, "slot": slot})


def exchange_ids(step: Step, chunk: Chunk) -> None:
    """Every rank's ids and counts into their rows; the rest is -1 and 0."""
    comm, ranks, views = step.comm, step.limits["ranks"], step.views
    ids, counts, own_ids, own_counts = (views[n] for n in ("ids", "counts", "local_ids", "local_counts"))
    start, stop = row_slice(comm.rank, ranks, ids.shape[0], chunk.rows)
    mine = stop - start
    ids[start:stop].copy_(own_ids[:mine])
    counts[start:stop].copy_(own_counts[:mine])
    sends: list[tuple[int, torch.Tensor]] = []
    receives: list[tuple[int, torch.Tensor]] = []
    for peer in range(ranks):
        if peer != comm.rank:
            sends += [(peer, own_ids[:mine]), (peer, own_counts[:mine])] if mine else []
            first, end = row_slice(peer, ranks, ids.shape[0], chunk.rows)
            receives += [(peer, ids[first:end]), (peer, counts[first:end])] if first < end else []
    if sends or receives:
        comm.exchange(sends, receives, step.name)
    ids[chunk.rows :].fill_(-1)
    counts[chunk.rows :].zero_()


def barrier(step: Step, chunk: Chunk) -> None:
    """Every rank passes, and its generation counter advances."""
    step.comm.barrier(step.name)
    step.views["signals"].add_(1)


def reduce_output(step: Step, chunk: Chunk) -> None:
    """Sum of all ranks' partial rows as a binary tree of adjacent ranks, rounded once, shared with every rank."""
    comm, ranks = step.comm, step.limits["ranks"]
    partial, output = step.views["partial"], step.views["output"]
    if ranks == 1:
        output[: chunk.rows].copy_(partial[: chunk.rows])
        return
    slices = [row_slice(rank, ranks, partial.shape[0], chunk.rows) for rank in range(ranks)]
    start, stop = slices[comm.rank]
    staging, width = step.raws["staging"], partial.shape[1]
    segment = staging.numel() // (ranks * width * 4)
    parts = staging[: segment * ranks * width * 4].view(torch.float32).view(ranks, segment, width)
    for offset in range(0, max(end - first for first, end in slices), max(1, segment)):
        count = min(segment, stop - start - offset)
        sends = [
            (peer, partial[first + offset : min(first + offset + segment, end)])
            for peer, (first, end) in enumerate(slices)
            if peer != comm.rank and first + offset < end
        ]
        receives = [(peer, parts[peer, :count]) for peer in range(ranks) if peer != comm.rank and count > 0]
        comm.exchange(sends, receives, f"{step.name} sum")
        if count > 0:
            here = slice(start + offset, start + offset + count)
            parts[comm.rank, :count].copy_(partial[here])
            output[here].copy_(_tree(parts, ranks, count))
    mine = [(peer, output[start:stop]) for peer in range(ranks) if peer != comm.rank and start < stop]
    theirs = [(peer, output[first:end]) for peer, (first, end) in enumerate(slices) if peer != comm.rank and first < end]
    if mine or theirs:
        comm.exchange(mine, theirs, f"{step.name} share")


def _tree(parts: torch.Tensor, ranks: int, count: int) -> torch.Tensor:
    step = 1
    while step < ranks:
        for left in range(0, ranks, 2 * step):
            parts[left, :count].add_(parts[left + step, :count])
        step *= 2
    return parts[0, :count]


TABLE: dict[str, Runner] = {
    "input": bind_input, "rows": rows, "append": append, "gather": gather, "select": select, "exchange_ids": exchange_ids,
    "barrier": barrier, "reduce_output": reduce_output,
}  # fmt: skip


def runner(name: str) -> Runner:
    """The loop called ``name``; the manifest's reader knows the names."""
    return TABLE[name]


__all__ = ["TABLE", "Chunk", "Step", "runner"]
