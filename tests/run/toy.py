"""A toy program with two histories and five ops of its own, small enough to read: for tests of the room that runs programs."""

import torch

from palimpsest.core.spec import Buffer, Limits, Plane, Program, Step
from palimpsest.kernels.call import Call, Chunk
from palimpsest.plan.place import place
from palimpsest.ranks.local import run_local
from palimpsest.run.execute import Session, prepare

WIDTH = 8


def plain(name: str, kind: str, dtype: str, axes: dict[str, int]) -> Buffer:
    return Buffer(name, kind, (Plane(name, dtype, tuple(axes.values()), tuple(a.split(":")[0] for a in axes)),), "toy")


def program(tokens: int = 1024, rows: int = 16, ranks: int = 1) -> Program:
    limits = Limits(tokens=tokens, rows=rows, ranks=ranks, page=64)
    keys = Buffer(
        "index_history", "reusable",
        (Plane("keys", "e4m3", (tokens, 128), ("tokens", "fixed")), Plane("scales", "fp32", (tokens,), ("tokens",))), "toy",
    )  # fmt: skip
    buffers = (
        plain("inv_freq", "table", "fp32", {"fixed": 4}),
        plain("signals", "signal", "i64", {"ranks": ranks}),
        plain("staging", "staging", "u8", {"fixed": 4096}),
        plain("latent_cache", "persistent", "u8", {"pages": limits.rank_pages, "fixed": 64 * 576}),
        plain("w.scale", "weights", "fp32", {"fixed": WIDTH}),
        plain("hidden", "reusable", "fp32", {"rows": rows, "fixed": WIDTH}),
        keys,
        plain("ids", "reusable", "i32", {"rows": rows, "topk": 4}),
        plain("latent_history", "reusable", "u8", {"tokens": tokens, "fixed": 576}),
        plain("output", "reusable", "fp32", {"rows": rows, "fixed": WIDTH}),
    )
    steps = (
        Step("bind", "toy_bind", "p0", writes=(("hidden", "hidden"),)),
        Step("append", "toy_append", "p1", reads=(("hidden", "hidden"),), updates=(("cache", "latent_cache"),)),
        Step("index", "toy_index", "p2", reads=(("cache", "latent_cache"),), writes=(("history", "index_history"),)),
        Step("select", "toy_select", "p4", reads=(("history", "index_history"),), writes=(("ids", "ids"),), scratch=256),
        Step("barrier", "toy_barrier", "barrier", updates=(("signals", "signals"),), scope="all"),
        Step("latent", "toy_latent", "p6", reads=(("cache", "latent_cache"),), writes=(("history", "latent_history"),)),
        Step(
            "attend", "toy_attend", "p7",
            reads=(("ids", "ids"), ("history", "latent_history"), ("hidden", "hidden"), ("scale", "w.scale")),
            writes=(("output", "output"),), scratch=4096,
        ),
    )  # fmt: skip
    return Program("toy", limits, buffers, steps, histories=("index_history", "latent_history"), outputs=("output",))


def toy_bind(call: Call, chunk: Chunk) -> None:
    call.view("hidden")[: chunk.rows].copy_(chunk.hidden)


def toy_append(call: Call, chunk: Chunk) -> None:
    cache, hidden = call.view("cache").view(-1, 576), call.view("hidden")
    cache[chunk.history : chunk.visible, : WIDTH * 4].copy_(hidden[: chunk.rows].view(torch.uint8))


def toy_index(call: Call, chunk: Chunk) -> None:
    keys, scales = call.view("history", "keys").view(torch.uint8), call.view("history", "scales")
    keys[: chunk.visible].copy_(call.view("cache").view(-1, 576)[: chunk.visible, :128])
    scales[: chunk.visible].fill_(1.0)


def toy_select(call: Call, chunk: Chunk) -> None:
    ids = call.view("ids").fill_(-1)
    best = call.scratch.take((4,), "i32")
    for row in range(chunk.rows):
        best.fill_(chunk.history + row)
        ids[row].copy_(best)


def toy_barrier(call: Call, chunk: Chunk) -> None:
    call.comm.barrier("toy")
    call.view("signals").add_(1)


def toy_latent(call: Call, chunk: Chunk) -> None:
    call.view("history")[: chunk.visible].copy_(call.view("cache").view(-1, 576)[: chunk.visible])


def toy_attend(call: Call, chunk: Chunk) -> None:
    row_sum = call.scratch.take((WIDTH,), "fp32")
    for row in range(chunk.rows):
        token = int(call.view("ids")[row, 0])
        record = call.view("history")[token, : WIDTH * 4].view(torch.float32)
        torch.mul(record, call.view("scale"), out=row_sum)
        torch.add(row_sum, call.view("hidden")[row], out=call.view("output")[row])
    call.tap("attended", output=call.view("output")[: chunk.rows])


OPS = {
    "toy_bind": toy_bind, "toy_append": toy_append, "toy_index": toy_index, "toy_select": toy_select, "toy_barrier": toy_barrier,
    "toy_latent": toy_latent, "toy_attend": toy_attend,
}  # fmt: skip


def fill(arena, comm) -> None:
    arena.view("w.scale").copy_(torch.arange(1.0, WIDTH + 1))
    arena.view("inv_freq").fill_(1.0)


def run(main, *, reuse: str = "on", ops=None, **sizes):
    """Prepare the toy on one rank, call ``main(session)`` and close; returns what ``main`` returned."""
    made = program(**sizes)
    plan = place(made, reuse)

    def rank(comm):
        with prepare(made, plan, comm=comm, fill=fill, implementations={**OPS, **(ops or {})}) as session:
            assert isinstance(session, Session)
            return main(session)

    return run_local(made.limits.ranks, rank)[0]
