"""barrier, portable engine."""

import numpy as np

from palimpsest.kernels.call import Call, Chunk


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. Passing means that every rank arrived, so every rank's generation advances."""
    call.comm.barrier(call.name)
    signals = call.view("signals").numpy()
    np.add(signals, 1, out=signals)
