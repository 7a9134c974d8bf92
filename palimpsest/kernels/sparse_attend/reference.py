"""sparse_attend, reference: softmax in fp64 from the same fp32 logits, so an fp32 engine agrees within a derived bound."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import Array, e4m3_values, fp32, store, wide


def run(call: Call, chunk: Chunk) -> None:
    p, context = call.params, call.view("context")  # [rows, heads, kv_lora]
    for row in range(chunk.rows):
        count = int(call.view("counts")[row])
        ids = [int(i) for i in call.view("ids")[row, :count]]
        if not ids:
            context[row] = 0
            continue
        records = np.stack([decode(call.view("latent_history")[i], p) for i in ids])  # [count, kv_lora+rope]
        with np.errstate(invalid="ignore"):
            logits = fp32(wide(call.view("query")[row]) @ records.T * p["softmax_scale"])  # [heads, count]
            weight = np.exp(logits - logits.max(axis=1, keepdims=True))  # [heads, count]
            store(context[row], weight @ records[:, : p["kv_lora"]] / weight.sum(axis=1, keepdims=True))


def decode(record: torch.Tensor, p: Mapping[str, Any]) -> Array:
    """One record [bytes] u8 as fp32-valued [kv_lora+rope]."""
    latent, kind = p["kv_lora"], p["format"]
    if kind == "fp8":
        return fp32(e4m3_values()[record.numpy()] * p["latent_scale"])
    if kind == "fp8_ds_mla":
        end = latent + 4 * (latent // 128)
        scales = wide(record[latent:end].clone().view(torch.float32))  # [blocks]
        values = fp32(e4m3_values()[record[:latent].numpy()].reshape(-1, 128) * scales[:, None])  # [blocks, 128]
        return np.concatenate([values.reshape(-1), wide(record[end:].clone().view(torch.bfloat16))])
    return wide(record.clone().view({"bf16": torch.bfloat16, "fp32": torch.float32}[kind]))
