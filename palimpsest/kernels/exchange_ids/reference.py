"""exchange_ids, reference: every owner broadcasts row by row."""

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import broadcast


def run(call: Call, chunk: Chunk) -> None:
    ids, counts = call.view("ids"), call.view("counts")  # [rows, topk], [rows] i32
    ids.fill_(-1)
    counts.fill_(0)
    size = call.view("local_ids").shape[0]
    for row in range(chunk.rows):
        owner, slot = divmod(row, size)
        if owner == call.comm.rank:
            ids[row] = call.view("local_ids")[slot]
            counts[row] = call.view("local_counts", "counts")[slot]
        broadcast(call.comm, owner, ids[row], call.name)
        broadcast(call.comm, owner, counts[row : row + 1], call.name)
