"""append_index, reference: one token at a time. Bytes agree wherever the projection is exact in fp32."""

import numpy as np
import torch

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import hadamard, layer_norm, project, quantise, rotate, table_rows, wide


def run(call: Call, chunk: Chunk) -> None:
    p = call.params
    page, dim = p["page"], p["dim"]
    for row in range(chunk.rows):
        token = chunk.history + row
        number, at = divmod(token, page)
        if number % p["ranks"] != call.comm.rank:
            continue
        key = project(wide(call.view("hidden")[row : row + 1]), call.view("index_k"))  # [1, dim]
        key = layer_norm(key, wide(call.view("index_k_norm")), wide(call.view("index_k_norm_bias")), p["eps"])
        table = table_rows(call, row, row + 1)
        if p["rope_layout"] != "none" and table is not None:
            key[:, : p["rope_dims"]] = rotate(key[:, : p["rope_dims"]], table, p["rope_layout"])
        if p["hadamard"]:
            key = hadamard(key)
        record = call.view("index_cache")[number // p["ranks"]]  # [page*record] u8
        if p["format"] == "fp32":
            record[at * 4 * dim : (at + 1) * 4 * dim] = torch.from_numpy(key[0].astype(np.float32)).view(torch.uint8)
            continue
        codes, scale = quantise(key, p["scale_format"])
        record[at * dim : (at + 1) * dim] = torch.from_numpy(codes[0])
        where = page * dim + 4 * at
        record[where : where + 4] = torch.from_numpy(scale.astype(np.float32)).view(torch.uint8)
