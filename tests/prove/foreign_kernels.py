"""Kernels that other people might bring, good and bad, for test_foreign.py."""

import torch

from palimpsest.kernels.append_index.cpu import run as append_index
from palimpsest.kernels.append_latent.cpu import run as append_latent
from palimpsest.kernels.gather_history.cpu import run as gather_history
from palimpsest.kernels.index_select.cpu import run as index_select
from palimpsest.kernels.reduce_output.cpu import run as reduce_output

NUMBER = 7


def _scores(keys, scales, query, weights, visible):
    """fp64, so that the order of distinct scores is right."""
    dots = torch.einsum("rhd,td->rht", query.double(), keys.double()).relu_()
    scores = torch.einsum("rht,rh->rt", dots, weights.double()) * scales
    return scores.masked_fill_(torch.arange(len(keys)) >= visible.unsqueeze(1), -torch.inf)


def _order(*given):
    return _scores(*given).argsort(dim=1, descending=True, stable=True)


def one_ulp(keys, scales, query, weights, visible, topk):
    """The id after the last one instead of the last one: the nearest miss there is."""
    order = _order(keys, scales, query, weights, visible)
    return torch.cat([order[:, : topk - 1], order[:, topk : topk + 1]], 1)


def duplicate(keys, scales, query, weights, visible, topk):
    ids = _order(keys, scales, query, weights, visible)[:, :topk].clone()
    ids[:, -1] = ids[:, 0]
    return ids


def invisible(keys, scales, query, weights, visible, topk):
    """Row 0 sees its neighbour's token."""
    ids = _order(keys, scales, query, weights, visible)[:, :topk].clone()
    if len(query) > 1:
        ids[0, -1] = visible[0]
    return ids


def one_fewer(keys, scales, query, weights, visible, topk):
    return _order(keys, scales, query, weights, visible)[:, : topk - 1]


def stale(keys, scales, query, weights, visible, topk):
    """Never looks at the keys."""
    return torch.arange(topk).repeat(len(query), 1)


def transposed(keys, scales, query, weights, visible, topk):
    return _order(keys, scales, query, weights, visible)[:, :topk].T


def ours(call, chunk):
    index_select(call, chunk)


def allocates(call, chunk):
    index_select(call, chunk)
    call.view("local_ids").copy_(call.view("local_ids") + 0)


def attend(query, records, ids, counts, scale):
    """Plain fp32 attention, row by row, ids in any precision of summation."""
    return _attend(query, records, ids, counts, scale)


def attend_scaled_twice(query, records, ids, counts, scale):
    return _attend(query, records, ids, counts, scale * scale)


def attend_drops_one(query, records, ids, counts, scale):
    return _attend(query, records, ids, (counts - 1).clamp(min=1), scale)


def _attend(query, records, ids, counts, scale):
    made = []
    for row, count in enumerate(counts.tolist()):
        chosen = records[ids[row, :count].long()]
        logits = query[row].float() @ chosen.T * scale
        weight = (logits - logits.amax(1, keepdim=True)).exp()
        made.append(weight @ chosen[:, :512] / weight.sum(1, keepdim=True))
    return torch.stack(made)


def same_gather_history(call, chunk):
    gather_history(call, chunk)


def same_append_index(call, chunk):
    append_index(call, chunk)


def same_reduce_output(call, chunk):
    reduce_output(call, chunk)


def append_latent_wrong(call, chunk):
    """Rounds one byte of the first appended record another way."""
    append_latent(call, chunk)
    cache = call.view("latent_cache")
    page = chunk.history // cache_page(call)
    if chunk.rows and page % call.comm.size == call.comm.rank:
        at = cache[page // call.comm.size].reshape(-1)
        start = chunk.history % cache_page(call) * (at.numel() // cache_page(call))
        at[start : start + 1].bitwise_xor_(1)


def cache_page(call):
    return call.params["page"]
