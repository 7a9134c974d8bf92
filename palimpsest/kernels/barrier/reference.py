"""barrier, reference."""

from palimpsest.kernels.call import Call, Chunk


def run(call: Call, chunk: Chunk) -> None:
    call.comm.barrier(call.name)
    signals = call.view("signals")  # [ranks] i64
    for rank in range(call.params["ranks"]):
        signals[rank] = int(signals[rank]) + 1
