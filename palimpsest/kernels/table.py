"""Which file implements which op on which engine. Lazy: nothing here imports torch until an implementation is asked for."""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from palimpsest.core.contract import OpContract
from palimpsest.core.errors import UnknownName

if TYPE_CHECKING:
    from palimpsest.core.spec import Program
    from palimpsest.kernels.call import Implementation


@dataclass(frozen=True)
class Engine:
    """An engine: the file of every op's folder that implements it, and the id of its arithmetic in records."""

    file: str
    arithmetic: str
    summary: str


ENGINES = {
    "portable": Engine("cpu", "portable-1", "torch and numpy on any CPU; allocates nothing after warm-up"),
    "reference": Engine("reference", "reference-1", "plain fp64 twin of every op, for tests and diagnosis; allocates freely"),
}

OPS = {
    "append_index": "palimpsest.kernels.append_index",
    "append_latent": "palimpsest.kernels.append_latent",
    "attention_query": "palimpsest.kernels.attention_query",
    "barrier": "palimpsest.kernels.barrier",
    "bind_inputs": "palimpsest.kernels.bind_inputs",
    "exchange_ids": "palimpsest.kernels.exchange_ids",
    "gather_history": "palimpsest.kernels.gather_history",
    "index_query": "palimpsest.kernels.index_query",
    "index_select": "palimpsest.kernels.index_select",
    "project_output": "palimpsest.kernels.project_output",
    "query_latent": "palimpsest.kernels.query_latent",
    "reduce_output": "palimpsest.kernels.reduce_output",
    "sparse_attend": "palimpsest.kernels.sparse_attend",
}


def engine_of(name: str) -> Engine:
    """The engine called ``name``. Raises UnknownName."""
    if name not in ENGINES:
        raise UnknownName("engine", name, list(ENGINES))
    return ENGINES[name]


def _module(op: str, file: str) -> ModuleType:
    if op not in OPS:
        raise UnknownName("op", op, list(OPS))
    return import_module(f"{OPS[op]}.{file}")


def contract(op: str) -> OpContract:
    """The contract of ``op``. Imports neither torch nor numpy. Raises UnknownName."""
    found: OpContract = _module(op, "contract").CONTRACT
    return found


def implementation(op: str, engine: str) -> "Implementation":
    """``run(call, chunk)`` of ``op`` on ``engine``. Raises UnknownName."""
    found: Implementation = _module(op, engine_of(engine).file).run
    return found


def prepare_engine(engine: str, program: "Program") -> int:
    """Import every op of ``program`` and check that this machine keeps the engine's promise; returns the GEMM shapes probed.

    Run once at prepare: it allocates. Raises UnknownName, and Unavailable when row bits would depend on their place in a tile.
    """
    from palimpsest.kernels.linear import probe_row_invariance

    file, shapes = engine_of(engine).file, []
    for step in program.steps:
        listed = getattr(_module(step.op, file), "gemms", None)
        if listed is not None:
            shapes += listed(dict(step.params))
    return probe_row_invariance(shapes)
