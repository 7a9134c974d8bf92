"""Micro geometries of the real layer program, run in the planned memory by in-process ranks."""

import torch

from palimpsest.core.geometry import Formats, Geometry, Indexer, Rope
from palimpsest.core.spec import Limits
from palimpsest.plan.place import place
from palimpsest.ranks.local import run_local
from palimpsest.recipes.blocks import layer_program
from palimpsest.recipes.rope import tables
from palimpsest.run.execute import prepare
from palimpsest.run.weights import synthetic


def geometry(rope: str = "interleaved", gate: bool = False) -> Geometry:
    dims = 16
    layout, rotated = ("none", 0) if rope == "none" else ("half", dims)
    return Geometry(
        family="micro", name="micro", hidden=64, layers=2, heads=4, q_lora=32, kv_lora=32, nope=16, rope=Rope(rope, dims),
        v_dim=16, softmax_scale=0.17, latent_norm_eps=1e-6, output_gate=gate, schedule=("full", "shared"), max_context=1024,
        indexer=Indexer(heads=4, dim=32, topk=24, rope_layout=layout, rope_dims=rotated, norm_eps=1e-6),
    )  # fmt: skip


def hidden(tokens: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed))


def run(main, *, ranks=1, tokens=128, rows=64, page=16, reuse="on", formats=None, made=None, layer=0, **more):
    """Prepare the layer on ``ranks`` and return ``main(session)`` of every rank."""
    made = made or geometry()
    program = layer_program(made, Limits(tokens, rows, ranks, page), formats or Formats(activation="fp32"), layer)
    plan = place(program, reuse)

    def rank(comm):
        with prepare(program, plan, comm=comm, fill=synthetic(1, tables(made)), **more) as session:
            return main(session)

    return run_local(ranks, rank)


def whole(session, chunks=(64, 64), guard=False, hooks=None) -> torch.Tensor:
    """Prefill in chunks from an empty cache and stack the outputs."""
    rows, at, found = hidden(sum(chunks)), 0, []
    for size in chunks:
        found.append(session.prefill(rows[at : at + size], at, copy=True, guard=guard, hooks=hooks))
        at += size
    return torch.cat(found)
