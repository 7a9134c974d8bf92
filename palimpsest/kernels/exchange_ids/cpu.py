"""exchange_ids, portable engine."""

from palimpsest.kernels.call import Call, Chunk
from palimpsest.ranks.layout import row_slice


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. Slices are sent from and received into their final places; a rank without active rows sends nothing."""
    comm, ranks = call.comm, call.params["ranks"]
    ids, counts = call.view("ids"), call.view("counts")
    local_ids, local_counts = call.view("local_ids"), call.view("local_counts", "counts")
    start, stop = row_slice(comm.rank, ranks, ids.shape[0], chunk.rows)
    mine = stop - start
    ids[start:stop].copy_(local_ids[:mine])
    counts[start:stop].copy_(local_counts[:mine])
    sends, receives = [], []
    for peer in range(ranks):
        if peer == comm.rank:
            continue
        if mine:
            sends += [(peer, local_ids[:mine]), (peer, local_counts[:mine])]
        first, end = row_slice(peer, ranks, ids.shape[0], chunk.rows)
        if first < end:
            receives += [(peer, ids[first:end]), (peer, counts[first:end])]
    if sends or receives:
        comm.exchange(sends, receives, call.name)
    ids[chunk.rows :].fill_(-1)
    counts[chunk.rows :].zero_()
