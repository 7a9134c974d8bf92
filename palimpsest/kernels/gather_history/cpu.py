"""gather_history, portable engine."""

import torch

from palimpsest.core.units import ceil_div
from palimpsest.kernels.call import Call, Chunk
from palimpsest.ranks.layout import global_page, local_pages


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. Pages are sent straight from the cache and received into staging, one segment per peer and round."""
    comm, ranks, page = call.comm, call.params["ranks"], call.params["page"]
    cache, staging = call.view("cache"), call.view("staging")
    planes, size = _planes(call), cache.shape[1]
    pages = ceil_div(chunk.visible, page)
    mine = local_pages(comm.rank, ranks, pages)
    _scatter(planes, cache[:mine], 0, comm.rank, call, chunk)
    peers = [rank for rank in range(ranks) if rank != comm.rank]
    segment = staging.numel() // (ranks * size)
    assert segment or not peers, f"{call.name}: staging of {staging.numel()} bytes holds no page of {size} bytes per rank"
    for first in range(0, local_pages(0, ranks, pages) if peers else 0, max(1, segment)):
        count = min(segment, mine - first)
        sends = [(peer, cache[first : first + count]) for peer in peers] if count > 0 else []
        receives = []
        for peer in peers:
            count = min(segment, local_pages(peer, ranks, pages) - first)
            if count > 0:
                at = peer * segment * size
                receives.append((peer, staging[at : at + count * size].view(count, size)))
        comm.exchange(sends, receives, call.name)
        for peer, received in receives:
            _scatter(planes, received, first, peer, call, chunk)


def _planes(call: Call) -> list[torch.Tensor]:
    """History planes as u8 [tokens, plane bytes], in the order of ``record``."""
    widths = [int(width) for width in call.params["record"].split("+")]
    planes = [
        plane.view(torch.uint8).view(-1, width) for plane, width in zip(call.views["history"].values(), widths, strict=True)
    ]
    assert len({plane.shape[0] for plane in planes}) == 1, f"{call.name}: planes of unequal token counts"
    return planes


def _scatter(planes: list[torch.Tensor], pages: torch.Tensor, first: int, owner: int, call: Call, chunk: Chunk) -> None:
    """Copy ``pages`` [n, page bytes], the owner's local pages from ``first`` on, to their tokens; the last one may be partial."""
    page, ranks = call.params["page"], call.params["ranks"]
    if not pages.shape[0]:
        return
    start = global_page(owner, first, ranks)
    last = global_page(owner, first + pages.shape[0] - 1, ranks)
    rest = min(page, chunk.visible - last * page)
    whole = pages.shape[0] - (rest < page)
    at = 0
    for plane in planes:
        width = plane.shape[1]
        size = page * width
        if whole:
            plane.view(-1, size)[start::ranks][:whole].copy_(pages[:whole, at : at + size])
        if rest < page:
            plane[last * page : last * page + rest].view(-1).copy_(pages[-1, at : at + rest * width])
        at += size
