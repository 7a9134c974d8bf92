"""append_latent, reference: one token at a time. Bytes agree wherever the projection is exact in fp32."""

import numpy as np
import torch

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import Array, e4m3_codes, fp32, project, quantise, rms_norm, rotate, table_rows, wide


def run(call: Call, chunk: Chunk) -> None:
    p = call.params
    latent = p["kv_lora"]
    for row in range(chunk.rows):
        number, at = divmod(chunk.history + row, p["page"])
        if number % p["ranks"] != call.comm.rank:
            continue
        values = project(wide(call.view("hidden")[row : row + 1]), call.view("kv_a"))  # [1, kv_lora+rope]
        values[:, :latent] = rms_norm(values[:, :latent], wide(call.view("kv_a_norm")), p["eps"])
        table = table_rows(call, row, row + 1)
        if p["rope_layout"] != "none" and table is not None:
            values[:, latent:] = rotate(values[:, latent:], table, p["rope_layout"])
        record = _record(values[0], p["format"], latent, p["latent_scale"])  # [record] u8
        page = call.view("latent_cache")[number // p["ranks"]]  # [page*record] u8
        page[at * record.numel() : (at + 1) * record.numel()] = record


def _record(values: Array, kind: str, latent: int, scale: float) -> torch.Tensor:
    """One token's bytes: ``values`` [kv_lora+rope] fp32-valued -> [record] u8"""
    if kind == "fp8":
        return torch.from_numpy(e4m3_codes(fp32(values / np.float32(scale))))
    single = torch.from_numpy(values.astype(np.float32))
    if kind == "fp8_ds_mla":
        codes, scales = quantise(values[:latent].reshape(-1, 128), "fp32")  # [blocks, 128] u8, [blocks]
        parts = [torch.from_numpy(codes.reshape(-1)), torch.from_numpy(scales.astype(np.float32)).view(torch.uint8)]
        return torch.cat([*parts, single[latent:].to(torch.bfloat16).view(torch.uint8)])
    return single.to({"bf16": torch.bfloat16, "fp32": torch.float32}[kind]).view(torch.uint8)
