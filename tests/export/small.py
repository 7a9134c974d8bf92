"""Planned layers of tiny models, cores whose programs are their Python functions, and a byte-for-byte comparison with the
eager engine.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from palimpsest import recipes
from palimpsest.checkpoint.make import make
from palimpsest.checkpoint.synthetic import PRESETS, config_of
from palimpsest.core.geometry import Formats
from palimpsest.core.spec import Limits, Program
from palimpsest.export import manifest
from palimpsest.export.checkpoint import plan_layer
from palimpsest.export.prepare import Options, prepare_core
from palimpsest.export.stages import Built, build
from palimpsest.export.weights import write_weights
from palimpsest.plan.place import place
from palimpsest.plan.plan import Plan
from palimpsest.ranks.local import run_local
from palimpsest.run.execute import prepare
from palimpsest.run.weights import Filler, synthetic
from palimpsest_loader.check import check_plan
from palimpsest_loader.manifest import read
from palimpsest_loader.session import Session
from palimpsest_loader.weights import Weights

ENVIRONMENT = {
    "torch": torch.__version__,
    "machine": "x86_64",
    "isa": "avx2",
    "cpu_flags": [],
    "compiler": "none",
    "device": "cpu",
}
CHUNKS = ((0, 32), (32, 5), (37, 0), (37, 1), (38, 31), (69, 32), (101, 27))


@dataclass
class Planned:
    program: Program
    plan: Plan
    built: Built
    fill: Filler
    hidden: int

    def tree(self) -> dict:
        """The manifest as the loader reads it; programs and files are placeholders."""
        made = {name: manifest.Compiled("0" * 64, "0" * 64, 0, self.built.engine(name)) for name in self.built.names}
        names = [f"weights/rank{rank}.safetensors" for rank in range(self.program.limits.ranks)]
        files = {name: {"sha256": "0" * 64, "bytes": 0} for name in names} | {
            manifest.program_file("0" * 64): {"sha256": "0" * 64, "bytes": 0}
        }
        return read(manifest.encode(manifest.tree(self.program, self.plan, self.built, made, ENVIRONMENT, files, names)))

    def calls(self) -> dict:
        """Every program as a call of its Python function."""
        return {name: (lambda tensors, f=function: f(*tensors)) for name, function in self.built.functions.items()}


def planned(
    formats: Formats | None = None,
    *,
    preset: str = "tiny-k31",
    ranks: int = 1,
    tokens: int = 256,
    rows: int = 32,
    layer: int | None = None,
    engine: str = "portable",
) -> Planned:
    geometry = recipes.geometry_from_config(config_of(PRESETS[preset]), preset)
    number = geometry.full_layers[0] if layer is None else layer
    program = recipes.program(geometry, Limits(tokens, rows, ranks, 16), formats or Formats(), number, engine=engine)
    return Planned(program, place(program, "on"), build(program), synthetic(3, recipes.tables(geometry)), geometry.hidden)


def session(one: Planned, tree: dict, comm, folder: Path, calls: dict | None = None) -> Session:
    path = folder / f"weights{comm.rank}"
    if not path.exists():
        write_weights(path, one.program, one.fill, comm.rank)
    return Session(tree, Weights(path, path.name, tree["weights"]["tensors"]), calls or one.calls(), comm)


class Copies:
    """Hooks of the eager engine that keep what every step wrote."""

    def __init__(self, arena):
        self.arena, self.found = arena, {}

    def before(self, step, call, chunk) -> None: ...

    def tap(self, step, event, **data) -> None: ...

    def after(self, step, call, chunk) -> None:
        for _, name in (*step.writes, *step.updates):
            self.found[name] = self.arena.raw(name).clone()


def differences(one: Planned, folder: Path, chunks=CHUNKS) -> list[str]:
    """What differs between the core and the eager engine, over all ranks and chunks; and outputs further apart than bf16
    rounds.
    """
    tree = one.tree()
    check_plan(tree)
    rows = torch.randn(256, one.hidden, generator=torch.Generator().manual_seed(1))

    def body(comm):
        found = []
        eager = prepare(one.program, one.plan, comm=comm, fill=one.fill)
        core = session(one, tree, comm, folder)
        for history, count in chunks:
            seen = {}

            def after(step: str, seen=seen) -> None:
                for name in next(s for s in tree["steps"] if s["name"] == step)["writes"]:
                    seen[name] = core.raw(name).clone()

            core.poison(0x7F)
            ours = core.prefill(rows[history : history + count], history, after=after)
            copies = Copies(eager.arena)
            theirs = eager.prefill(rows[history : history + count], history, hooks=copies)
            found += [
                f"{history}+{count}: {line}" for line in unequal(one.program, seen, copies.found, history, count, comm.rank)
            ]
            if count and float((ours.float() - theirs.float()).abs().max()) > 0.02 * float(theirs.float().abs().max()):
                found.append(f"{history}+{count}: outputs are far apart")
        return found

    return [line for lines in run_local(one.program.limits.ranks, body) for line in lines]


def unequal(program: Program, ours: dict, theirs: dict, history: int, count: int, rank: int) -> list[str]:
    each = program.limits.slice_rows
    mine = max(0, min(count - rank * each, each))
    lead = dict.fromkeys(("q_latent", "rope", "ids", "counts", "query"), count)
    lead |= dict.fromkeys(("index_query", "head_weights", "local_ids", "local_counts"), mine)
    lead |= dict.fromkeys(("index_history", "latent_history"), history + count)
    found = []
    for name in set(theirs) & (set(lead) | {"index_cache", "latent_cache"}):
        for plane in program.by_name[name].planes:
            start = program.by_name[name].plane_offset(plane.name)
            stop = start + plane.nbytes // plane.shape[0] * lead.get(name, plane.shape[0])
            if not torch.equal(ours[name][start:stop], theirs[name][start:stop]):
                found.append(f"rank {rank}: {name} {plane.name}")
    return found


def prepared(folder: Path, *, ranks: str = "2", jobs: int = 2):
    """A real core of a tiny checkpoint."""
    checkpoint, store, core = folder / "model", folder / "store", folder / "core"
    make("tiny-k31", checkpoint, overrides={"topk": 16})
    layer = plan_layer(checkpoint, context="256", rows="32", ranks=ranks, page="16")
    made = prepare_core(layer.program, layer.plan, layer.fill, core, Options(store, jobs))
    return core, made.digest, checkpoint, store
