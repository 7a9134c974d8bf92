"""The micro model of the field cases as whole layers: 2 index heads of dim 8, latent 16 + 4, 4 heads, top-k 8, 64 tokens, page
4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from bare_ranks import Rank, on_ranks

from palimpsest.core.geometry import Formats, Geometry, Indexer, Rope
from palimpsest.core.spec import Limits, Program
from palimpsest.kernels.call import Chunk, no_tap
from palimpsest.recipes.blocks import layer_program

TOKENS, ROWS, PAGE, TOPK = 64, 16, 4, 8

FP8 = Formats()
FP32 = Formats(index="fp32", latent="fp32", activation="fp32", weights="fp32")
FORMATS = {"fp8": FP8, "fp32": FP32, "bf16": Formats(latent="bf16"), "fp8_ds_mla": Formats(latent="fp8_ds_mla")}


def geometry(
    *,
    heads: int = 4,
    index_heads: int = 2,
    rope: str = "interleaved",
    index_rope: str = "half",
    hadamard: bool = True,
    latent: int = 16,
) -> Geometry:
    indexer = Indexer(index_heads, 8, TOPK, index_rope, 4, 1e-6, hadamard=hadamard)
    return Geometry(
        family="test", name="m0", hidden=32, layers=1, heads=heads, q_lora=24, kv_lora=latent, nope=8,
        rope=Rope(rope, 4), v_dim=8, softmax_scale=0.3, latent_norm_eps=1e-6, output_gate=True, indexer=indexer,
        schedule=("full",), max_context=TOKENS,
    )  # fmt: skip


def program(g: Geometry, formats: Formats, ranks: int) -> Program:
    return layer_program(g, Limits(TOKENS, ROWS, ranks, PAGE), formats, 0)


def weights(g: Geometry, seed: int = 0) -> dict[str, torch.Tensor]:
    """Whole-model weights by buffer name."""
    generator, ix = torch.Generator().manual_seed(seed), g.indexer
    shapes = {
        "q_a": (g.q_lora, g.hidden), "q_a_norm": (g.q_lora,), "q_b": (g.heads * (g.nope + g.rope.dims), g.q_lora),
        "kv_a": (g.latent_dim, g.hidden), "kv_a_norm": (g.kv_lora,), "uk": (g.heads, g.nope, g.kv_lora),
        "uv": (g.heads, g.v_dim, g.kv_lora), "o": (g.hidden, g.heads * g.v_dim), "gate": (g.heads * g.v_dim, g.hidden),
        "index_q": (ix.heads * ix.dim, g.q_lora), "index_k": (ix.dim, g.hidden), "index_k_norm": (ix.dim,),
        "index_k_norm_bias": (ix.dim,), "index_w": (ix.heads, g.hidden),
    }  # fmt: skip
    return {f"w.{name}": torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def load(rank: Rank, g: Geometry, full: dict[str, torch.Tensor]) -> None:
    """This rank's head slice of every weight, and the rotary frequencies."""
    size = rank.comm.size
    for name, value in full.items():
        target = rank.view(name)
        if name in ("w.uk", "w.uv", "w.q_b", "w.gate"):
            value = value.view(size, -1)[rank.comm.rank]
        elif name == "w.o":
            value = value.view(g.hidden, size, -1)[:, rank.comm.rank]
        target.copy_(value.reshape(target.shape))
    if "inv_freq" in rank.planes:
        rank.view("inv_freq").copy_(torch.tensor([1.0, 0.01]))


@dataclass
class Outcome:
    """output [tokens, hidden], ids [tokens, topk], counts [tokens] of all chunks, and the caches of every rank."""

    output: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor
    caches: list[dict[str, torch.Tensor]]

    def same(self, other: "Outcome") -> bool:
        return all(
            torch.equal(getattr(self, n).view(torch.uint8), getattr(other, n).view(torch.uint8))
            for n in ("output", "ids", "counts")
        )


def hidden_rows(seed: int = 9, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(seed))


def prefill(
    g: Geometry,
    formats: Formats,
    ranks: int,
    chunks: Sequence[int],
    hidden: torch.Tensor,
    *,
    engine: str = "portable",
    poison: int = 0x7F,
    before: Callable[[Rank, Chunk], None] | None = None,
    tap: Callable[..., None] = no_tap,
) -> Outcome:
    """Prefill ``chunks`` rows one after the other; every reusable and staging byte is ``poison`` before each chunk.

    All ranks must end with the same output, ids and counts.
    """
    layer, full = program(g, formats, ranks), weights(g)

    def body(comm):
        rank, history, parts = Rank(layer, comm, engine, tap=tap), 0, []
        load(rank, g, full)
        for rows in chunks:
            chunk = Chunk(history, rows, hidden[history : history + rows])
            rank.poison(poison)
            if before:
                before(rank, chunk)
            output = rank.run(chunk)
            parts.append((output, rank.view("ids")[:rows].clone(), rank.view("counts")[:rows].clone()))
            history += rows
        caches = {name: rank.raw[name].clone() for name in ("index_cache", "latent_cache")}
        return [torch.cat(p) for p in zip(*parts, strict=True)], caches

    found = on_ranks(ranks, body)
    outcome = Outcome(*found[0][0], [caches for _, caches in found])
    for values, _ in found[1:]:
        assert outcome.same(Outcome(*values, [])), "ranks disagree"
    return outcome
