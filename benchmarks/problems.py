"""Seeded calls of the two hot ops at real sizes, bound to buffers of their own."""

from dataclasses import dataclass

import numpy as np
import torch

from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.table import contract, implementation


class Alone:
    """The comm of a single rank."""

    rank, size = 0, 1


def scratch_of(op: str, params: dict[str, object]) -> Scratch:
    raw = torch.empty(contract(op).scratch(**params) + 64, dtype=torch.uint8)
    return Scratch(raw[-raw.data_ptr() % 64 :])


@dataclass(frozen=True)
class Bound:
    """A call that can be repeated."""

    call: Call
    chunk: Chunk
    engine: str

    def __call__(self) -> None:
        implementation(self.call.name, self.engine)(self.call, self.chunk)

    @property
    def scratch(self) -> int:
        return self.call.scratch.raw.numel()


@dataclass
class Index:
    """index_select: ``rows`` rows at the end of ``tokens`` tokens."""

    rows: int
    tokens: int
    heads: int
    topk: int = 2048
    dim: int = 128

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.tokens)
        self.query = (torch.randn(self.rows, self.heads, self.dim, generator=g) * 2).to(torch.float8_e4m3fn)
        self.keys = torch.empty(self.tokens, self.dim, dtype=torch.float8_e4m3fn)
        for first in range(0, self.tokens, 1 << 16):
            part = self.keys[first : first + (1 << 16)]
            part.copy_(torch.randn(part.shape, generator=g) * 2)
        self.weights, self.scales = torch.randn(self.rows, self.heads, generator=g), torch.rand(self.tokens, generator=g) + 0.5

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.tokens * self.heads * self.dim

    def bound(self, engine: str, threads: int = 1, rows: slice = slice(None)) -> Bound:
        count = len(range(*rows.indices(self.rows)))
        first = rows.start or 0
        params = {
            "topk": self.topk,
            "heads": self.heads,
            "dim": self.dim,
            "format": "fp8",
            "ranks": 1,
            "engine": engine,
            "threads": threads,
        }
        planes = {
            "index_history": {"keys": self.keys, "scales": self.scales},
            "index_query": {"q": self.query[rows]},
            "head_weights": {"w": self.weights[rows]},
            "local_ids": {"ids": torch.empty(count, self.topk, dtype=torch.int32)},
            "local_counts": {name: torch.empty(count, dtype=torch.int32) for name in ("counts", "nans")},
        }
        call = Call("index_select", params, planes, {}, scratch_of("index_select", params), Alone())
        return Bound(call, Chunk(self.tokens - self.rows + first, count), engine)


@dataclass
class Attention:
    """sparse_attend on fp8 records of 512 + 64: ``rows`` rows of 2048 ids; ``shared``: share of its ids a row has in common
    with all."""

    rows: int
    tokens: int
    heads: int
    shared: float = 0.0
    format: str = "fp8"

    def __post_init__(self) -> None:
        g, rng, k = torch.Generator().manual_seed(self.heads), np.random.default_rng(self.tokens), 2048
        self.query = torch.randn(self.rows, self.heads, 576, generator=g).bfloat16()
        self.latent = torch.randn(self.tokens, 576, generator=g).to(torch.float8_e4m3fn).view(torch.uint8)
        base, ids = rng.permutation(self.tokens), np.empty((self.rows, k), np.int32)
        for row in range(self.rows):
            kept = base[:k][rng.random(k) < self.shared]
            rest = base[k:] if len(base) - k >= k else base
            others = np.setdiff1d(rng.choice(rest, min(len(rest), 2 * k), replace=False), kept)
            ids[row] = np.sort(np.concatenate([kept, rng.permutation(others)[: k - len(kept)]]))
        self.ids = torch.from_numpy(ids)

    def bound(self, engine: str, threads: int = 1) -> Bound:
        params = {
            "topk": 2048, "heads": self.heads, "kv_lora": 512, "rope_dims": 64, "format": self.format, "latent_scale": 1.0,
            "softmax_scale": 0.05, "activation": "bf16", "engine": engine, "threads": threads,
        }  # fmt: skip
        planes = {
            "ids": {"ids": self.ids},
            "counts": {"counts": torch.full((self.rows,), 2048, dtype=torch.int32)},
            "latent_history": {"latent": self.latent},
            "query": {"query": self.query},
            "context": {"context": torch.empty(self.rows, self.heads, 512)},
        }
        call = Call("sparse_attend", params, planes, {}, scratch_of("sparse_attend", params), Alone())
        return Bound(call, Chunk(self.tokens - self.rows, self.rows), engine)

    def torch_gather(self) -> None:
        """What a torch user writes: bf16 latents, index_select per row, two matrix products, softmax."""
        latent = self.bf16
        for row in range(self.rows):
            picked = latent.index_select(0, self.ids[row])
            p = torch.softmax((self.query[row] @ picked.t()).float() * 0.05, 1).bfloat16()
            torch.mm(p, picked[:, :512])

    def torch_dense(self) -> None:
        """Dense absorbed attention under a mask, all rows and heads at once, bf16."""
        heads = self.heads
        mask = torch.full((self.rows, 1, self.tokens), -torch.inf).scatter_(2, self.ids.long().unsqueeze(1), 0.0)
        logits = (self.query.view(-1, 576) @ self.bf16.t()).view(self.rows, heads, self.tokens).float() * 0.05 + mask
        p = torch.softmax(logits, 2).bfloat16()
        torch.mm(p.view(self.rows * heads, self.tokens), self.bf16[:, :512])

    @property
    def bf16(self) -> torch.Tensor:
        if not hasattr(self, "_bf16"):
            self._bf16 = self.latent.view(torch.float8_e4m3fn).bfloat16()
        return self._bf16
