"""index_query, reference. Bytes agree wherever the two projections are exact in fp32."""

import numpy as np
import torch

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import fp32, hadamard, project, quantise, rotate, store, table_rows, wide


def run(call: Call, chunk: Chunk) -> None:
    p, out = call.params, call.view("index_query")  # [slice, heads, dim]
    start = min(call.comm.rank * out.shape[0], chunk.rows)
    stop = min(start + out.shape[0], chunk.rows)
    count = stop - start
    hidden, latent = (
        wide(call.view("hidden")[start:stop]),
        wide(call.view("q_latent")[start:stop]),
    )  # [count, hidden], [count, q_lora]
    table = table_rows(call, start, stop)
    weights = project(hidden, call.view("index_w"))  # [count, heads]
    weights = fp32(weights * np.float32(p["heads"] ** -0.5))
    weights = fp32(weights * np.float32(p["dim"] ** -0.5))
    for head in range(p["heads"]):
        q = project(latent, call.view("index_q")[head * p["dim"] : (head + 1) * p["dim"]])  # [count, dim]
        if p["rope_layout"] != "none" and table is not None:
            q[:, : p["rope_dims"]] = rotate(q[:, : p["rope_dims"]], table, p["rope_layout"])
        if p["hadamard"]:
            q = hadamard(q)
        if p["format"] == "fp8" and count:
            codes, scale = quantise(q, p["scale_format"])  # [count, dim] u8, [count]
            out[:count, head].view(torch.uint8).copy_(torch.from_numpy(codes))
            weights[:, head] = fp32(weights[:, head] * scale)
        else:
            store(out[:count, head], q)
    store(call.view("head_weights")[:count], weights)
