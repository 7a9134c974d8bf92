"""A core against its own layer: ids, caches and histories of the eager engine byte for byte, attention and output by the oracle.

``core-1`` rounds as ``portable-1`` does up to the selection. Its attention adds over all selected ids in an order the BLAS
chooses
(block 0 of ``Arithmetic``), so it is held to the derived bound of that, and so is the projection behind it.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from palimpsest.core.errors import BadConfig
from palimpsest.core.spec import Step
from palimpsest.export.checkpoint import Layer, plan_layer
from palimpsest.export.replay import chunks, digest, fill_caches, hidden_rows, selection
from palimpsest.kernels.call import Call, Chunk
from palimpsest.prove.bounds import PORTABLE_1, U32, U_BF16, compound
from palimpsest.prove.oracle import LatentFormat, attend, check_context
from palimpsest.ranks.comm import Comm
from palimpsest.ranks.local import run_local
from palimpsest.run.execute import Session as Eager
from palimpsest.run.execute import prepare
from palimpsest_loader.core import Core
from palimpsest_loader.session import Session
from palimpsest_loader.weights import Weights

#: how core-1 rounds: portable-1, but one sum over all selected ids, in any order
CORE_1 = dataclasses.replace(PORTABLE_1, name="core-1", block=0)
#: one vectorised fp32 sigmoid: an exponential of 1 ulp, an addition and a division
SIGMOID_U = 4 * U32

F64 = NDArray[np.float64]
Found = tuple[str, bool, int, str]


@dataclass
class _Seen:
    """What one replay showed: digests by name, and copies of a few rows."""

    digests: dict[str, str] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Tally:
    """Per gate: units compared, the first fault, the largest share of a bound that was used."""

    units: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("selection", "caches", "histories", "attention", "output"), 0)
    )
    faults: dict[str, str] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)

    def check(self, gate: str, good: bool, units: int, fault: str) -> None:
        self.units[gate] += units
        if not good:
            self.faults.setdefault(gate, fault)


def compare(core: Core, model: Path, seed: int) -> list[Found]:
    """(gate, passed, units, detail) of every gate. Raises BadConfig when ``model`` does not give the core's program and plan."""
    tree, limits = core.tree, core.tree["limits"]
    layer = plan_layer(
        model,
        int(tree["facts"]["layer"]),
        context=str(limits["tokens"]),
        rows=str(limits["rows"]),
        ranks=str(limits["ranks"]),
        page=str(limits["page"]),
        engine=engine_of(tree),
    )
    if (layer.program.digest, layer.plan.digest) != (tree["program"], tree["plan"]):
        raise BadConfig(f"{model} gives another program or plan than {core.path} holds; pass the checkpoint it was prepared from")

    def body(comm: Comm) -> _Tally:
        name, tally = tree["weights"]["files"][comm.rank], _Tally()
        weights = Weights(core.path / name, name, tree["weights"]["tensors"])
        with (
            prepare(layer.program, layer.plan, comm=comm, fill=layer.fill, engine=engine_of(tree)) as eager,
            Session(tree, weights, core.programs, comm) as session,
        ):
            _one_rank(session, eager, layer, seed, tally)
        return tally

    return _found(run_local(int(limits["ranks"]), body))


def engine_of(tree: dict[str, Any]) -> str:
    """The eager engine a core's selection is held to: the one its native programs are from."""
    names = {one["engine"].removeprefix("native-") for one in tree["programs"].values() if one["engine"] != "aoti"}
    return names.pop() if names else "portable"


def _found(tallies: list[_Tally]) -> list[Found]:
    found: list[Found] = []
    for gate in tallies[0].units:
        fault = next((f"rank {rank}: {t.faults[gate]}" for rank, t in enumerate(tallies) if gate in t.faults), "")
        worst = max((t.worst.get(gate, 0.0) for t in tallies), default=0.0)
        good = (
            "equal to the eager engine" if gate not in ("attention", "output") else f"within the bound, at most {worst:.2g} of it"
        )
        found.append((gate, not fault, sum(t.units[gate] for t in tallies), fault or good))
    return found


def _one_rank(session: Session, eager: Eager, layer: Layer, seed: int, tally: _Tally) -> None:
    tree = session.tree
    fill_caches(session, seed)
    caches = [n for n, b in tree["buffers"].items() if b["kind"] == "persistent"]
    for name in caches:
        eager.arena.raw(name).copy_(session.raw(name))
    rows = hidden_rows(tree, seed + 1)
    for chunk in chunks(tree)[:-2]:
        ours, theirs = _Seen(), _Seen()
        writes = {s["name"]: s["writes"] for s in tree["steps"]}
        picked = sorted({0, chunk[1] // 2, chunk[1] - 1}) if chunk[1] else []
        look = partial(_look, session.raw, tree=tree, seen=ours, chunk=chunk, picked=picked, rank=session.comm.rank)

        def after(name: str, look: Any = look, writes: dict[str, Any] = writes) -> None:
            look(writes[name])

        session.poison(0x7F)
        out = session.prefill(rows[: chunk[1]], chunk[0], after=after, copy=True, **selection(tree, chunk))
        hooks = _Hooks(eager, tree, theirs, chunk, picked)
        eager.prefill(rows[: chunk[1]], chunk[0], hooks=hooks, **selection(tree, chunk))
        where = f"history {chunk[0]}, {chunk[1]} rows"
        for name, wanted in theirs.digests.items():
            gate = "caches" if name in caches else "histories" if "history" in name else "selection"
            tally.check(gate, ours.digests[name] == wanted, 1, f"{where}: {name} differs from the eager engine's")
        for i in range(len(picked)):
            _oracle(session, layer, ours, i, tally, f"{where}, row {picked[i]}")
        if picked:
            _rounded(session, ours, out[picked], tally, where)


class _Hooks:
    """Looks at what the eager engine wrote."""

    def __init__(self, eager: Eager, tree: dict[str, Any], seen: _Seen, chunk: tuple[int, int], picked: list[int]):
        self.eager, self.tree, self.seen, self.chunk, self.picked = eager, tree, seen, chunk, picked

    def before(self, step: Step, call: Call, chunk: Chunk) -> None:
        pass

    def tap(self, step: Step, event: str, **data: Any) -> None:
        pass

    def after(self, step: Step, call: Call, chunk: Chunk) -> None:
        written = [name for access, name in step.accesses() if access != "read"]
        _look(self.eager.arena.raw, written, self.tree, self.seen, self.chunk, self.picked, self.eager.comm.rank)


#: buffers compared byte for byte, and how many of their leading rows count
_ROWS = {
    "rope": "rows",
    "q_latent": "rows",
    "query": "rows",
    "ids": "rows",
    "counts": "rows",
    "index_query": "slice",
    "head_weights": "slice",
    "local_ids": "slice",
    "local_counts": "slice",
}
_TOKENS = ("index_history", "latent_history")
_COPIED = ("hidden", "query", "context", "partial", "ids", "counts")


def _look(
    raw: Any, written: Any, tree: dict[str, Any], seen: _Seen, chunk: tuple[int, int], picked: list[int], rank: int
) -> None:
    """Digest what counts of the buffers just written; copy the picked rows of those the oracle reads."""
    limits = tree["limits"]
    each = limits["rows"] // limits["ranks"]
    active = {"rows": chunk[1], "slice": max(0, min(chunk[1] - rank * each, each)), "tokens": chunk[0] + chunk[1]}
    for name in written:
        if name not in tree["buffers"]:
            continue
        buffer, data = tree["buffers"][name], raw(name)
        if buffer["kind"] == "persistent":
            seen.digests[name] = digest(data)
        elif name in _ROWS or name in _TOKENS:
            count = active["tokens" if name in _TOKENS else _ROWS[name]]
            parts = [_leading(data, plane, buffer, count) for plane in buffer["planes"]]
            seen.digests[name] = digest(*parts)
        if name in _COPIED:
            plane = buffer["planes"][0]
            seen.rows[name] = (
                torch.stack([_leading(data, plane, buffer, row + 1)[-_width(plane, buffer) :] for row in picked])
                if picked
                else data[:0]
            )
        if name == "latent_history" and picked:
            width = _width(buffer["planes"][0], buffer)
            topk, ids = tree["buffers"]["ids"]["planes"][0]["shape"][1], seen.rows["ids"].view(torch.int32)
            records = data[: active["tokens"] * width].view(-1, width)[ids.clamp(min=0).long().view(-1)]
            seen.rows["records"] = records.view(len(picked), topk, width)


def _width(plane: dict[str, Any], buffer: dict[str, Any]) -> int:
    """Bytes of one row of a plane."""
    later = [p["offset"] for p in buffer["planes"] if p["offset"] > plane["offset"]]
    return (min(later, default=buffer["nbytes"]) - plane["offset"]) // plane["shape"][0]


def _leading(data: torch.Tensor, plane: dict[str, Any], buffer: dict[str, Any], count: int) -> torch.Tensor:
    return data[plane["offset"] : plane["offset"] + count * _width(plane, buffer)]


def _oracle(session: Session, layer: Layer, seen: _Seen, at: int, tally: _Tally, where: str) -> None:
    """Attention of one row against the oracle, then its partial output against fp64 from that attention."""
    g, facts = layer.geometry, dict(layer.program.facts)
    layout = LatentFormat(str(facts["latent_format"]), g.kv_lora, g.rope.dims, g.latent_scale)
    count = int(seen.rows["counts"][at].view(torch.int32)[0])
    heads = session.view("context").shape[1]
    context = seen.rows["context"][at].view(torch.float32).view(heads, g.kv_lora).numpy()
    query = _wide(seen.rows["query"][at], str(facts["activation"])).reshape(heads, -1)
    truth = attend(seen.rows["records"][at, :count].numpy(), query, layout, softmax_scale=g.softmax_scale, arithmetic=CORE_1)
    result = check_context(context, truth)
    tally.check(
        "attention",
        not result.faults,
        result.checked,
        f"{where}: {result.faults} of {result.checked} coordinates outside the bound",
    )
    tally.worst["attention"] = max(tally.worst.get("attention", 0.0), result.worst)
    value, bound = _projected(session, context.astype(np.float64), _wide(seen.rows["hidden"][at], str(facts["activation"])))
    partial = seen.rows["partial"][at].view(torch.float32).numpy().astype(np.float64)
    share = np.abs(partial - value) / bound
    tally.check(
        "output",
        bool((share <= 1).all()),
        len(share),
        f"{where}: {int((share > 1).sum())} of {len(share)} partial sums outside the bound",
    )
    tally.worst["output"] = max(tally.worst.get("output", 0.0), float(share.max()))


def _projected(session: Session, context: F64, hidden: F64) -> tuple[F64, F64]:
    """Partial output [hidden] of one row in fp64 and a bound on what fp32 can make of it.

    v = c uv' (depth k), v g with g = sigmoid(h gate') whose argument errs by at most d = ((1+u)^H - 1) |h| |gate'|, sum over
    heads and v of
    v g o': a term meets k + 1 + 2 + v + heads roundings, its gate a factor e^d (1 + 4u).
    """
    steps = session.tree["steps"]
    passed = next(one for step in steps for one in step["passes"] if "w.uv" in [a["buffer"] for a in one["args"]])
    names = {a["buffer"] for a in passed["args"]}
    tensors = {n: _weight(session, n) for n in ("w.uv", "w.o", "w.gate") if n in names}
    heads, v_dim, depth = tensors["w.uv"].shape
    value, size = (
        np.einsum("hvk,hk->hv", tensors["w.uv"], context),
        np.einsum("hvk,hk->hv", np.abs(tensors["w.uv"]), np.abs(context)),
    )
    drift = np.zeros_like(value)
    if "w.gate" in tensors:
        argument = (tensors["w.gate"] @ hidden).reshape(heads, v_dim)
        drift = compound(len(hidden) + 1, U32) * (np.abs(tensors["w.gate"]) @ np.abs(hidden)).reshape(heads, v_dim)
        gate = 1 / (1 + np.exp(-argument))
        value, size = value * gate, size * gate
    o = tensors["w.o"]
    growth = (1 + compound(depth + v_dim + heads + 4, U32)) * np.exp(drift) * (1 + SIGMOID_U) - 1
    return o @ value.reshape(-1), (np.abs(o) @ (size * growth).reshape(-1)) * (1 + 1e-9) + 2.0**-120


def _weight(session: Session, name: str) -> F64:
    fact = session.tree["weights"]["tensors"][name]
    raw = session._weights.tensor(name, fact["dtype"], fact["shape"])
    return raw.to(torch.float64).numpy()


def _wide(raw: torch.Tensor, dtype: str) -> F64:
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    return raw.clone().view(kind).to(torch.float64).numpy()


def _rounded(session: Session, seen: _Seen, output: torch.Tensor, tally: _Tally, where: str) -> None:
    """One rank's output is its partial rows, rounded once. (With more ranks it is their sum: the bound of one rounding and
    the tree.)
    """
    ranks = int(session.tree["limits"]["ranks"])
    partial = seen.rows["partial"].view(torch.float32).view(output.shape)
    if ranks == 1:
        tally.check(
            "output",
            torch.equal(partial.to(output.dtype), output),
            len(output),
            f"{where}: the output is not the rounded partial",
        )
        return
    total, size = partial.to(torch.float64), partial.abs().to(torch.float64)
    for shared in (total, size):
        mine = shared.clone()
        for distance in range(1, ranks):
            there, here = (session.comm.rank + distance) % ranks, (session.comm.rank - distance) % ranks
            got = torch.empty_like(mine)
            session.comm.exchange([(there, mine)], [(here, got)], "qualify output")
            shared.add_(got)
    unit = U_BF16 if output.dtype == torch.bfloat16 else U32
    bound = compound(ranks, U32) * size + unit * (total.abs() + compound(ranks, U32) * size) + 2.0**-120
    good = (output.to(torch.float64) - total).abs() <= bound
    tally.check(
        "output", bool(good.all()), good.numel(), f"{where}: {int((~good).sum())} outputs are not the ranks' sum rounded once"
    )
