"""gather_history, reference: every page is broadcast by its owner, in token order; staging is not used."""

import torch

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import broadcast


def run(call: Call, chunk: Chunk) -> None:
    p, cache = call.params, call.view("cache")  # [rank_pages, page*record] u8
    widths = [int(width) for width in p["record"].split("+")]
    for first in range(0, chunk.visible, p["page"]):
        number = first // p["page"]
        owner = number % p["ranks"]
        mine = owner == call.comm.rank
        page = cache[number // p["ranks"]].clone() if mine else torch.empty(cache.shape[1], dtype=torch.uint8)  # [page*record]
        broadcast(call.comm, owner, page, call.name)
        count, at = min(p["page"], chunk.visible - first), 0
        for plane, width in zip(call.views["history"].values(), widths, strict=True):
            rows = plane.view(torch.uint8).view(-1, width)  # [tokens, width]
            rows[first : first + count] = page[at : at + count * width].view(count, width)
            at += p["page"] * width
