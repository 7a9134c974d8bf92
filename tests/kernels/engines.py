"""Data and calls for the compiled engines' tests: engines of this machine, seeded index and attention calls of realistic
shape."""

from dataclasses import dataclass, field

import numpy as np
import torch
from bare_ranks import aligned, make_call

from palimpsest.kernels.call import Chunk, no_tap
from palimpsest.kernels.detect import available_engines, has_vdpbf16ps
from palimpsest.kernels.table import implementation

#: compiled engines this machine runs. Where there is no AMX the amx tests do not apply, and test_detect proves the refusal
COMPILED = [name for name in ("amx", "avx512", "avx") if name in available_engines()]
#: kernels of the avx engine, by their function in ``index_select.avx``; the second one where the compile target allows it
AVX_KERNELS = (["plain_loops"] + ["vector_dots"] * has_vdpbf16ps()) if "avx" in COMPILED else []
#: what selects: the engines, the avx engine once with each of its kernels; ``parametrize("engine", SELECTING, indirect=True)``
SELECTING = [name for name in COMPILED if name != "avx"] + [f"avx {name}" for name in AVX_KERNELS]


class One:
    """The comm of a single rank, or of one rank looked at alone."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size


@dataclass
class Index:
    """An index_select problem: queries [rows, heads, dim], keys [tokens, dim] e4m3; weights, scales fp32."""

    rows: int
    tokens: int
    heads: int = 64
    dim: int = 128
    topk: int = 2048
    seed: int = 0
    queries: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.queries = (torch.randn(self.rows, self.heads, self.dim, generator=g) * 2).to(torch.float8_e4m3fn)
        self.keys = (torch.randn(self.tokens, self.dim, generator=g) * 2).to(torch.float8_e4m3fn)
        self.weights = torch.randn(self.rows, self.heads, generator=g)
        self.scales = torch.rand(self.tokens, generator=g) + 0.5

    def select(self, engine, history, *, rows=None, threads=1, tap=no_tap, rank=0, ranks=1, fill=0x7F):
        """ids [n, topk], counts [n], nans [n] of chunk rows ``rows`` (all of them by default), row r seeing history + r + 1
        tokens."""
        first, end = (0, self.rows) if rows is None else rows
        count = end - first
        size = -(-count // ranks)
        mine = slice(first + rank * size, min(first + (rank + 1) * size, end))
        pad = size - (mine.stop - mine.start)

        def put(t):
            return torch.cat([t[mine], t[:1].expand(pad, *t.shape[1:])]) if pad else t[mine].clone()

        planes = {
            "index_history": {"keys": self.keys, "scales": self.scales},
            "index_query": {"index_query": put(self.queries)},
            "head_weights": {"head_weights": put(self.weights)},
            "local_ids": {"local_ids": torch.full((size, self.topk), -7, dtype=torch.int32)},
            "local_counts": {n: torch.full((size,), -7, dtype=torch.int32) for n in ("counts", "nans")},
        }
        params = {
            "topk": self.topk,
            "heads": self.heads,
            "dim": self.dim,
            "format": "fp8",
            "ranks": ranks,
            "engine": engine,
            "threads": threads,
        }
        call = make_call("index_select", params, planes, One(rank, ranks), tap=tap, scratch_fill=fill)
        implementation("index_select", engine)(call, Chunk(history + first, count))
        n = mine.stop - mine.start
        return tuple(t[:n] for t in (planes["local_ids"]["local_ids"], *planes["local_counts"].values()))

    def values(self, row):
        """(query, weights, keys, scales) of a row as fp32 arrays."""
        return self.queries[row].float().numpy(), self.weights[row].numpy(), self.keys.float().numpy(), self.scales.numpy()


def latents(tokens, fmt, kv_lora, rope, seed=0):
    """Records [tokens, record] u8 of ``fmt``."""
    g = torch.Generator().manual_seed(seed)
    if fmt == "fp8":
        return torch.randn(tokens, kv_lora + rope, generator=g).to(torch.float8_e4m3fn).view(torch.uint8)
    if fmt == "bf16":
        return torch.randn(tokens, kv_lora + rope, generator=g).bfloat16().view(torch.uint8)
    codes = (torch.randn(tokens, kv_lora, generator=g) * 100).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(tokens, kv_lora // 128, generator=g) * 0.01 + 0.005).view(torch.uint8)
    return torch.cat([codes, scales, torch.randn(tokens, rope, generator=g).bfloat16().view(torch.uint8)], 1).contiguous()


@dataclass
class Attention:
    """A sparse_attend problem with ``counts`` repeated over the rows; ids random or given."""

    rows: int
    tokens: int
    heads: int = 8
    fmt: str = "fp8"
    kv_lora: int = 512
    rope: int = 64
    topk: int = 2048
    counts: tuple[int, ...] = (2048,)
    seed: int = 0
    latent_scale: float = 1.0
    scale: float = 0.05

    def __post_init__(self) -> None:
        g, rng = torch.Generator().manual_seed(self.seed), np.random.default_rng(self.seed)
        self.history = latents(self.tokens, self.fmt, self.kv_lora, self.rope, self.seed)
        self.query = torch.randn(self.rows, self.heads, self.kv_lora + self.rope, generator=g).bfloat16()
        self.ids = torch.full((self.rows, self.topk), -1, dtype=torch.int32)
        self.count = torch.tensor([self.counts[r % len(self.counts)] for r in range(self.rows)], dtype=torch.int32)
        for row in range(self.rows):
            picked = np.sort(rng.permutation(self.tokens)[: int(self.count[row])])
            self.ids[row, : len(picked)] = torch.from_numpy(picked.astype(np.int32))

    def attend(self, engine, *, rows=None, heads=None, threads=1, start=0, fill=0x7F, history=None):
        """context [n, heads, kv_lora] of a slice of rows and heads; ``start``: history before the first row of the slice."""
        rows, heads = rows or slice(None), heads or slice(None)
        query = self.query[rows, heads].contiguous()
        context = torch.full((*query.shape[:2], self.kv_lora), torch.nan)
        planes = {
            "ids": {"ids": self.ids[rows].clone()},
            "counts": {"counts": self.count[rows].clone()},
            "latent_history": {"latent_history": self.history if history is None else history},
            "query": {"query": query},
            "context": {"context": context},
        }
        params = {
            "topk": self.topk, "heads": query.shape[1], "kv_lora": self.kv_lora, "rope_dims": self.rope, "format": self.fmt,
            "latent_scale": self.latent_scale, "softmax_scale": self.scale, "activation": "bf16", "engine": engine, "threads":
            threads,
        }  # fmt: skip
        call = make_call("sparse_attend", params, planes, One(), scratch_fill=fill)
        implementation("sparse_attend", engine)(call, Chunk(start, len(query)))
        return context


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


__all__ = ["AVX_KERNELS", "COMPILED", "SELECTING", "Attention", "Index", "One", "aligned", "latents", "same_bits"]
