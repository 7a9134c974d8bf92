"""Which file implements which op on which engine. Lazy: nothing here imports torch until an implementation is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from palimpsest.core.contract import OpContract
from palimpsest.core.errors import BadConfig, UnknownName

if TYPE_CHECKING:
    from palimpsest.core.spec import Program
    from palimpsest.kernels.call import Implementation


@dataclass(frozen=True)
class Engine:
    """An engine: which file of an op's folder implements it, and the id of its arithmetic in records.

    file:   of every op that ``faster`` does not name
    faster: op -> file, where the engine has one of its own. Projections follow the step's ``engine`` inside the ``cpu`` files
    needs:  the name under which ``detect`` offers it, "" when it runs everywhere
    """

    file: str
    arithmetic: str
    summary: str
    faster: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""

    def file_of(self, op: str) -> str:
        return self.faster.get(op, self.file)


_AMX = {"index_query": "amx", "index_select": "amx", "sparse_attend": "amx"}
ENGINES = {
    "portable": Engine("cpu", "portable-1", "torch and numpy on any CPU; allocates nothing after warm-up"),
    "reference": Engine("reference", "reference-1", "plain fp64 twin of every op, for tests and diagnosis; allocates freely"),
    "amx": Engine("cpu", "amx-1", "AMX bf16 tiles for scores, attention and projections; the rest as portable", _AMX, "amx"),
    "amx-union": Engine(
        "cpu", "amx-union-1", "as amx, but neighbouring rows may share a pass over their records: bits depend on neighbours",
        _AMX | {"sparse_attend": "amx_union"}, "amx",
    ),
    "avx": Engine(
        "cpu", "avx-1", "compiled loops for scores and selection; the rest as portable", {"index_select": "avx"}, "avx",
    ),
    "avx512": Engine(
        "cpu", "avx512-1", "as avx; attention and projections with VDPBF16PS; the rest as portable",
        {"index_select": "avx", "sparse_attend": "avx512"}, "avx512",
    ),
}  # fmt: skip

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
    """``run(call, chunk)`` of ``op`` on ``engine``, compiled. Raises UnknownName, and Unavailable on a machine that lacks the
    engine."""
    chosen = engine_of(engine)
    if chosen.needs:
        from palimpsest.kernels.detect import choose_engine

        choose_engine(chosen.needs)
    found: Implementation = _module(op, chosen.file_of(op)).run
    return found


def compile_engine(engine: str, progress: Callable[[int, int, str], None] | None = None) -> None:
    """Compile everything ``engine`` compiles, or load it from the cache: seconds the first time. Run it once before starting
    ranks.

    progress: called with (done, total, what comes next). Raises UnknownName and Unavailable.
    """
    chosen = engine_of(engine)
    projections = {"amx": "amx_linear", "avx512": "avx512_linear"}
    work = sorted(chosen.faster) + (["projections"] if chosen.needs in projections else [])
    for done, what in enumerate(work):
        if progress:
            progress(done, len(work), f"{what} for {engine}")
        if what == "projections":
            import_module(f"palimpsest.kernels.{projections[chosen.needs]}")
        else:
            implementation(what, engine)
    if progress and work:
        progress(len(work), len(work), "")


def prepare_engine(engine: str, program: "Program", progress: Callable[[int, int, str], None] | None = None) -> int:
    """Import every op of ``program`` and check that this machine keeps the engine's promise; returns the GEMM shapes probed.

    Run once at prepare: it allocates. Raises UnknownName; BadConfig for a program planned with another engine's scratch;
    Unavailable when
    the machine lacks the engine or row bits would depend on their place in a tile.
    """
    from palimpsest.kernels.linear import probe_row_invariance

    chosen, shapes = engine_of(engine), []
    compile_engine(engine, progress)
    for step in program.steps:
        params = dict(step.params)
        planned = params.get("engine", engine)
        if engine not in (planned, "reference"):
            raise BadConfig(
                f"step {step.name} is planned for engine {planned} and would run on {engine}; plan it again for {engine}"
            )
        listed = getattr(_module(step.op, chosen.file_of(step.op)), "gemms", None)
        if listed is not None:
            shapes += listed(params)
    return probe_row_invariance(shapes)
