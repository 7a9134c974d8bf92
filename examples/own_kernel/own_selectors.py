"""Selectors of three people: ``torch.topk`` on the whole row, one that breaks ties at random, and one that is off by one.

    palimpsest qualify --kernel index_select=own_selectors:topk_row

Signature of a plain index_select, one call per chunk and rank:
    keys     [tokens, dim]         e4m3 or fp32, as stored; every token cached so far
    scales   [tokens]              fp32, one per key (ones when keys are fp32)
    query    [rows, heads, dim]    as stored
    weights  [rows, heads]         fp32
    visible  [rows]                int64: row r may select ids below visible[r]
    topk     int
    returns  [rows, <= topk]       integer ids in any order, padded with -1
"""

import torch


def scores_of(keys, scales, query, weights, visible):
    """Scores [rows, tokens] in fp32: scale * sum over heads of weight * relu(query . key); -inf where a row sees nothing."""
    dots = torch.einsum("rhd,td->rht", query.float(), keys.float()).relu_()
    scores = torch.einsum("rht,rh->rt", dots, weights) * scales
    hidden = torch.arange(len(keys)) >= visible.unsqueeze(1)
    return scores.masked_fill_(hidden, -torch.inf)


def topk_row(keys, scales, query, weights, visible, topk):
    """The first foreign kernel of this project: torch.topk, whose choice among equal scores is not specified."""
    best = scores_of(keys, scales, query, weights, visible).topk(min(topk, len(keys)), dim=1)
    return best.indices.masked_fill(best.values == -torch.inf, -1)


def random_ties(keys, scales, query, weights, visible, topk):
    """Equal scores in random order, another one at every call: a radix selection with atomic counters behaves like this."""
    scores = scores_of(keys, scales, query, weights, visible)
    shuffled = torch.randperm(len(keys))
    best = scores[:, shuffled].topk(min(topk, len(keys)), dim=1)
    return shuffled[best.indices].masked_fill(best.values == -torch.inf, -1)


def off_by_one(keys, scales, query, weights, visible, topk):
    """A bug that looks harmless: ranks 1 .. k instead of 0 .. k-1, so every full row loses its best token."""
    best = scores_of(keys, scales, query, weights, visible).topk(min(topk + 1, len(keys)), dim=1)
    ids = best.indices.masked_fill(best.values == -torch.inf, -1)
    full = (visible > topk).unsqueeze(1)
    return torch.where(full, ids[:, -topk:], ids[:, :topk]) if ids.shape[1] > topk else ids
