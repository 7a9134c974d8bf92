"""bind_inputs, reference."""

import numpy as np
import torch

from palimpsest.kernels.call import Call, Chunk


def run(call: Call, chunk: Chunk) -> None:
    hidden = call.view("hidden")  # [rows, hidden]
    if chunk.hidden is not None:
        hidden[: chunk.rows] = chunk.hidden.to(hidden.dtype)
    if call.has("rope"):
        inverse = call.view("inv_freq").numpy()  # [pairs] fp32
        for row in range(chunk.rows):
            angle = np.float32(chunk.history + row) * inverse  # [pairs] fp32
            cos_sin = np.stack([np.cos(angle.astype(np.float64)), np.sin(angle.astype(np.float64))], axis=1)  # [pairs, 2]
            call.view("rope")[row] = torch.from_numpy(cos_sin.astype(np.float32))
