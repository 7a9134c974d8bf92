"""From a checkpoint folder to what ``prepare_core`` takes: a program, its plan and a filler."""

from dataclasses import dataclass
from pathlib import Path

from palimpsest import recipes
from palimpsest.checkpoint.index import open_checkpoint
from palimpsest.core.geometry import Geometry
from palimpsest.core.spec import Limits, Program
from palimpsest.core.units import parse_count
from palimpsest.plan.place import place
from palimpsest.plan.plan import Plan
from palimpsest.run.weights import Filler, from_checkpoint


@dataclass(frozen=True)
class Layer:
    """One planned layer of a checkpoint."""

    geometry: Geometry
    layer: int
    program: Program
    plan: Plan
    fill: Filler


def plan_layer(
    model: Path,
    layer: int | None = None,
    *,
    context: str | None = None,
    rows: str = "4096",
    ranks: str = "1",
    page: str = "64",
    engine: str = "portable",
) -> Layer:
    """Plan one layer; counts are texts such as ``1M``. ``layer`` defaults to the first that runs an indexer; the core holds the
    selection of ``engine``.

    Raises BadCheckpoint, BadConfig and Unsupported as reading, planning and the recipes do.
    """
    checkpoint = open_checkpoint(model)
    geometry = recipes.geometry_from_config(dict(checkpoint.config), checkpoint.root.name)
    prefix = recipes.resolve_prefix(geometry, checkpoint.tensors)
    number = layer if layer is not None else next(iter(geometry.full_layers), geometry.sparse_layers[0])
    tokens = parse_count(context, "--context") if context else geometry.max_context
    limits = Limits(tokens, parse_count(rows, "--rows"), parse_count(ranks, "--ranks"), parse_count(page, "--page"))
    program = recipes.program(geometry, limits, recipes.default_formats(geometry), number, engine=engine)
    fill = from_checkpoint(
        checkpoint, lambda rank, size: recipes.weight_slices(geometry, number, rank, size, prefix), recipes.tables(geometry)
    )
    return Layer(geometry, number, program, place(program, "on"), fill)
