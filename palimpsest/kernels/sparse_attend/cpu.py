"""sparse_attend, portable engine: one row at a time, heads in groups of HEAD_TILE, ids in blocks of ID_BLOCK as emitted.

logit = fp32(fp64(query . record) * softmax_scale); p = exp(fp32(logit - max)) in fp32; the row sum and p @ values accumulate
block by block in fp32; context = accumulated / row sum. Every GEMM has one shape, short blocks are padded with zero records whose
p is zero."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from palimpsest.core.errors import UnknownName
from palimpsest.core.geometry import LATENT_FORMATS
from palimpsest.core.units import ceil_div
from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.fp8 import Decoder
from palimpsest.kernels.linear import Gemm
from palimpsest.kernels.sizes import HEAD_TILE, ID_BLOCK

#: elements that share a scale in an fp8_ds_mla record
BLOCK = 128

#: (records [n, record] u8, out [n, dim] fp32) -> decodes
Reader = Callable[[torch.Tensor, torch.Tensor], None]


def gemms(params: Mapping[str, Any]) -> list[Gemm]:
    dim = params["kv_lora"] + params["rope_dims"]
    return [("fp64", HEAD_TILE, dim, ID_BLOCK), ("fp32", HEAD_TILE, ID_BLOCK, params["kv_lora"])]


class _Tiles:
    """Scratch of one call, carved once."""

    def __init__(self, call: Call):
        scratch, p = call.scratch, call.params
        scratch.reset()
        dim, groups, blocks = p["kv_lora"] + p["rope_dims"], ceil_div(p["heads"], HEAD_TILE), ceil_div(p["topk"], ID_BLOCK)
        self.read = _reader(scratch, p)
        self.raw = scratch.take((ID_BLOCK, call.view("latent_history").shape[1]), "u8")
        self.records = scratch.take((blocks, ID_BLOCK, dim), "fp32")
        self.wide = scratch.take((ID_BLOCK, dim), "fp64")
        self.query = scratch.take((groups, HEAD_TILE, dim), "fp64")
        self.dots = scratch.take((groups, blocks, HEAD_TILE, ID_BLOCK), "fp64")
        self.logits = scratch.take((groups, blocks, HEAD_TILE, ID_BLOCK), "fp32")
        self.peak = scratch.take((HEAD_TILE, 1), "fp32")
        self.part = scratch.take((HEAD_TILE, 1), "fp32")
        self.total = scratch.take((HEAD_TILE, 1), "fp32")
        self.context = scratch.take((HEAD_TILE, p["kv_lora"]), "fp32")
        self.block_peaks = scratch.take((blocks, HEAD_TILE), "fp32")


def run(call: Call, chunk: Chunk) -> None:
    """See the contract. ``counts`` says how many ids of a row are real; a row without any gives zeros."""
    heads, topk = call.params["heads"], call.params["topk"]
    if not chunk.rows:
        return
    tiles = _Tiles(call)
    tiles.query.zero_()
    padded = tiles.query.view(-1, tiles.query.shape[2])
    counts, query, context = call.view("counts").numpy(), call.view("query"), call.view("context")
    for row in range(chunk.rows):
        count = int(counts[row])
        assert 0 <= count <= topk, f"{call.name}: row {row} has count {count}, top-k is {topk}"
        if count == 0:
            context[row].zero_()
            continue
        padded[:heads].copy_(query[row])
        _logits(call, tiles, row, count)
        for group in range(tiles.query.shape[0]):
            first = group * HEAD_TILE
            _attend(tiles, group, ceil_div(count, ID_BLOCK))
            end = min(first + HEAD_TILE, heads)
            context[row, first:end].copy_(tiles.context[: end - first])


def _logits(call: Call, tiles: _Tiles, row: int, count: int) -> None:
    """Gather and decode the row's records; fill ``logits`` [groups, blocks, HEAD_TILE, ID_BLOCK], -inf past ``count``."""
    ids, history = call.view("ids")[row], call.view("latent_history")
    blocks = ceil_div(count, ID_BLOCK)
    for block in range(blocks):
        first, end = block * ID_BLOCK, min((block + 1) * ID_BLOCK, count)
        torch.index_select(history, 0, ids[first:end], out=tiles.raw[: end - first])
        records = tiles.records[block]
        tiles.read(tiles.raw[: end - first], records[: end - first])
        records[end - first :].zero_()
        tiles.wide.copy_(records)
        for group in range(tiles.query.shape[0]):
            torch.mm(tiles.query[group], tiles.wide.t(), out=tiles.dots[group, block])
    for dots in tiles.dots:
        used = dots[:blocks].numpy()
        np.multiply(used, call.params["softmax_scale"], out=used)
    logits = tiles.logits[:, :blocks]
    logits.copy_(tiles.dots[:, :blocks])
    if count < blocks * ID_BLOCK:
        logits[:, -1, :, count - (blocks - 1) * ID_BLOCK :].fill_(-torch.inf)


def _attend(tiles: _Tiles, group: int, blocks: int) -> None:
    """``context`` [HEAD_TILE, kv_lora] of one head group over ``blocks`` blocks."""
    logits, latent = tiles.logits[group, :blocks], tiles.context.shape[1]
    peaks = tiles.block_peaks[:blocks]
    torch.amax(logits, 2, out=peaks)
    torch.amax(peaks, 0, out=tiles.peak.view(-1))
    tiles.context.zero_()
    tiles.total.zero_()
    for block in range(blocks):
        p = logits[block]
        torch.exp(p.sub_(tiles.peak), out=p)
        torch.sum(p, 1, keepdim=True, out=tiles.part)
        tiles.total.add_(tiles.part)
        tiles.context.addmm_(p, tiles.records[block, :, :latent])
    tiles.context.div_(tiles.total)


def _reader(scratch: Scratch, p: Mapping[str, Any]) -> Reader:
    """How records of ``format`` become fp32 values."""
    latent, dim, kind = p["kv_lora"], p["kv_lora"] + p["rope_dims"], p["format"]
    if kind == "fp8":
        return Decoder(scratch, ID_BLOCK * dim, "fp32", p["latent_scale"])
    if kind == "fp8_ds_mla":
        decode, scales = Decoder(scratch, ID_BLOCK * latent, "fp32"), latent + 4 * (latent // BLOCK)
        values = scratch.take((ID_BLOCK, latent // BLOCK, BLOCK), "fp32")

        def read_ds_mla(records: torch.Tensor, out: torch.Tensor) -> None:
            used = values[: records.shape[0]]
            decode(records[:, :latent], used.view(-1, latent))
            used.mul_(records[:, latent:scales].view(torch.float32).unsqueeze(2))
            out[:, :latent].copy_(used.view(-1, latent))
            out[:, latent:].copy_(records[:, scales:].view(torch.bfloat16))

        return read_ds_mla
    if kind not in LATENT_FORMATS:
        raise UnknownName("latent format", kind, LATENT_FORMATS)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]

    def read(records: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(records.view(dtype))

    return read
