"""The Python API of planning: what ``palimpsest plan``, ``fit``, ``explain`` and ``--compare`` do, as functions on frozen values.

    from palimpsest import Limits, compare, fit, load_geometry, plan

    planned = plan(load_geometry("kimi-k3.1-pro"), Limits(tokens=1 << 20, rows=4096, ranks=16))
    planned.on.peak, planned.saved

Importing this module imports neither torch nor numpy, and nothing of a library until a picture is asked for.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palimpsest.core.errors import BadConfig, Unsupported
from palimpsest.core.geometry import Formats, Geometry
from palimpsest.core.spec import Limits, Program
from palimpsest.plan.account import CPU_GRANULARITY, Comparison
from palimpsest.plan.engines_cell import Deployment, EngineBill
from palimpsest.plan.explain import Explanation
from palimpsest.plan.plan import Plan

if TYPE_CHECKING:
    from palimpsest.plan.fit import Fit

__all__ = ["Deployment", "Formats", "Geometry", "Limits", "Planned", "compare", "fit", "load_geometry", "plan"]

#: rows of one prefill chunk when nobody says
ROWS = 4096


@dataclass(frozen=True)
class Planned:
    """One program planned in both arrangements, each accepted by the independent checker. Bytes are of one rank.

    on, off: the plan, and the same plan with the index history on bytes of its own
    bill:    both itemised: ``bill.on.slots``, ``bill.on.per_token``, ``bill.saved_mapped``, ...
    """

    geometry: Geometry
    program: Program
    on: Plan
    off: Plan
    bill: Comparison

    @property
    def saved(self) -> int:
        """Logical bytes that sharing the histories saves."""
        return self.bill.saved_logical

    def explain(self, reuse: str = "on") -> Explanation:
        """Why the peak is the peak, and what each reuse of bytes saved."""
        from palimpsest.plan.explain import explain

        return explain(self.program, self.off if reuse == "off" else self.on)

    def write_html(self, path: str | Path) -> Path:
        """Write the interactive picture. Raises Unavailable without ``pip install 'palimpsest[report]'``."""
        from palimpsest.report.picture import write_html

        return write_html(self.program, self.on, self.off, path)

    def write_image(self, path: str | Path) -> Path:
        """Write the picture as .svg or .png. Raises Unavailable without ``pip install 'palimpsest[report]'``."""
        from palimpsest.report.picture import write_image

        return write_image(self.program, self.on, self.off, path)


def load_geometry(model: str | Path) -> Geometry:
    """The numbers of a model: a preset name (``kimi-k3.1-pro``, ...), a ``config.json``, or a checkpoint folder.

    Raises UnknownName, BadConfig, BadCheckpoint, Unsupported; each says what to do.
    """
    from palimpsest.recipes import load_geometry as load

    return load(str(model))


def plan(
    model: Geometry | str,
    limits: Limits,
    formats: Formats | None = None,
    *,
    layer: int | None = None,
    whole: bool = False,
    weights: str = "checkpoint",
    granularity: int = CPU_GRANULARITY,
) -> Planned:
    """Plan one layer's prefill at ``limits``, or the whole model's, and check both arrangements.

    model:       a Geometry, or anything ``load_geometry`` takes
    formats:     stored dtypes; the model's usual ones when None
    layer:       0-based; the first layer that runs an indexer when None
    whole:       plan every layer as one program instead, its weights stored as ``weights`` says (``recipes.model_program``)
    granularity: bytes the allocator maps at once, for mapped figures
    Raises Unsupported, BadConfig, PlanRefused.
    """
    from palimpsest.plan.account import compare as both
    from palimpsest.plan.check import check
    from palimpsest.plan.place import place

    geometry = load_geometry(model) if isinstance(model, str) else model
    made = _program(geometry, limits, formats, layer=layer, weights=weights, whole=whole)
    on, off = place(made), place(made, "off")
    for found in (on, off):
        check(made, found)
    return Planned(geometry, made, on, off, both(made, on, off, granularity))


def fit(
    model: Geometry | str,
    memory: int | str,
    *,
    ranks: int | None = None,
    context: int | None = None,
    rows: int | None = None,
    formats: Formats | None = None,
    weights: str = "checkpoint",
    whole: bool = True,
    reserve: int = 0,
) -> "Fit":
    """The inverse of ``plan``: what ``memory`` bytes per rank (or a text such as ``"96GiB"``) hold.

    ranks given:             the largest context, for chunks of ``rows`` rows (4,096 when None)
    ranks and context given: the most rows of one chunk
    context given:           the fewest ranks, for chunks of ``rows`` rows
    whole:   weigh the whole model with its weights stored as ``weights`` says; otherwise one layer that runs an indexer
    reserve: bytes of ``memory`` that no plan may use (driver, libraries)
    ``Fit.limits`` holds the answer and ``Fit.binding`` the role that grows most; when ``Fit.fits`` is False, ``Fit.cannot`` is
    the smallest set of buffers that cannot exist together. Raises BadConfig when neither ranks nor context is given, or rows
    with both.
    """
    from palimpsest.core.units import parse_bytes
    from palimpsest.plan import fit as search

    geometry = load_geometry(model) if isinstance(model, str) else model
    budget = search.Budget(parse_bytes(memory, "memory") if isinstance(memory, str) else memory, reserve)

    def build(limits: Limits) -> Program:
        return _program(geometry, limits, formats, weights=weights, whole=whole)

    if context is None:
        if ranks is None:
            raise BadConfig("fit needs ranks (it finds the largest context) or context (it finds the fewest ranks)")
        return search.largest_context(build, budget, rows=rows or ROWS, ranks=ranks, least=geometry.indexer.topk)
    if ranks is None:
        return search.fewest_ranks(build, budget, tokens=context, rows=rows or ROWS)
    if rows is not None:
        raise BadConfig("ranks, context and rows are all given: nothing is left to find; leave one out, or use plan")
    return search.largest_rows(build, budget, tokens=context, ranks=ranks)


def compare(
    model: Geometry | str, limits: Limits, formats: Formats | None = None, deployment: Deployment | None = None
) -> tuple[EngineBill, ...]:
    """What vLLM, SGLang, TensorRT-LLM, lmdeploy and llama.cpp would allocate for the same prefill, ours last.

    Every cell has its number, formula, symbols, source file and kind, or the reason why it cannot be computed.
    """
    from palimpsest.plan.engines import compare_rows

    planned = plan(model, limits, formats)
    return compare_rows(planned.geometry, limits, planned.program, planned.on, deployment)


def _program(
    geometry: Geometry,
    limits: Limits,
    formats: Formats | None,
    *,
    layer: int | None = None,
    weights: str = "checkpoint",
    whole: bool = False,
) -> Program:
    from palimpsest import recipes

    chosen = formats or recipes.default_formats(geometry)
    if whole:
        return recipes.model_program(geometry, limits, chosen, weights=weights)
    if layer is None and not geometry.full_layers:
        raise Unsupported(f"{geometry.name} has no layer that runs an indexer; palimpsest plans sparse attention only")
    return recipes.program(geometry, limits, chosen, geometry.full_layers[0] if layer is None else layer)
