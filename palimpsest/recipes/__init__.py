"""One model, one file: geometry from a config, tensor names, program. Imports neither torch nor numpy.

``load_geometry`` reads a user's ``config.json`` through ``checkpoint.config`` (bounds on size, depth and keys). That import is
lazy and is the one arrow from here to ``checkpoint``; everything else is a pure function of a dictionary.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from palimpsest.core.errors import BadCheckpoint, BadConfig, UnknownName, Unsupported
from palimpsest.core.geometry import Formats, Geometry
from palimpsest.core.spec import Limits, Program
from palimpsest.recipes import weights
from palimpsest.recipes.drafter import Drafter, drafter_from_config
from palimpsest.recipes.headers import HeaderWeights, weights_from_headers
from palimpsest.recipes.model import deferred_buffers, model_program
from palimpsest.recipes.rope import tables
from palimpsest.recipes.table import family_of, preset_folder, presets, recipe
from palimpsest.recipes.tensors import model_parameters
from palimpsest.recipes.weights import WeightSlice

__all__ = [
    "Drafter",
    "HeaderWeights",
    "WeightSlice",
    "attention_tensors",
    "default_formats",
    "deferred_buffers",
    "drafter_from_config",
    "forbidden_tensors",
    "geometry_from_config",
    "load_geometry",
    "model_parameters",
    "model_program",
    "prefixes",
    "presets",
    "program",
    "resolve_prefix",
    "tables",
    "weight_slices",
    "weights_from_headers",
]


def load_geometry(model: str) -> Geometry:
    """Geometry of a preset name, a ``config.json`` path, or a checkpoint folder. A preset wins; write ``./name`` for a folder.

    Raises UnknownName for a name that is neither, BadConfig and BadCheckpoint for a path that cannot be read, Unsupported for a
    model no recipe fits.
    """
    model = str(model)
    if model in presets():
        return geometry_from_config(json.loads((preset_folder() / f"{model}.json").read_text("utf-8")), model)
    path = Path(model)
    try:
        folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise BadConfig(f"model path {model[:200]!r} cannot be read: {error}") from None
    if not exists:
        if path.suffix == ".json" or len(path.parts) > 1:
            raise BadConfig(
                f"no such file or folder: {model!r}; give a config.json, a checkpoint folder, or one of {', '.join(presets())}"
            )
        raise UnknownName("model (no preset, file or folder has that name)", model, presets())
    if folder:
        path = path / "config.json"
        if not path.is_file():
            raise BadCheckpoint(
                f"folder {model!r} has no config.json; a checkpoint folder holds config.json and its safetensors files"
            )
    from palimpsest.checkpoint.config import read_config

    return geometry_from_config(
        read_config(path), Path(os.path.abspath(path)).parent.name if path.name == "config.json" else path.stem
    )


def geometry_from_config(config: dict[str, Any], name: str) -> Geometry:
    """Geometry from a parsed ``config.json``. Raises BadConfig for impossible values, Unsupported for what no recipe computes.

    ``name`` may be any folder's name: what a plan or a terminal cannot hold becomes ``?``.
    """
    shown = "".join(letter if letter.isprintable() else "?" for letter in name[:200])
    return recipe(family_of(config)).geometry(config, shown)


def default_formats(geometry: Geometry) -> Formats:
    """Stored dtypes a deployment of this model uses: fp8 index records, the family's latent records, bf16 rows and weights."""
    return Formats(index="fp8", latent=geometry.latent_format, activation="bf16", weights="bf16")


def program(
    geometry: Geometry, limits: Limits, formats: Formats, layer: int, *, engine: str = "portable", threads: int = 1
) -> Program:
    """The attention sublayer of 0-based ``layer`` as buffers and steps, with the scratch of ``engine`` on ``threads`` threads.

    Raises Unsupported for a layer without any.
    """
    return recipe(geometry.family).program(geometry, limits, formats, layer, engine=engine, threads=threads)


def prefixes(geometry: Geometry) -> tuple[str, ...]:
    """What may stand before ``layers.<N>.`` in tensor names, the published spelling first."""
    return recipe(geometry.family).PREFIXES


def resolve_prefix(geometry: Geometry, tensors: Iterable[str]) -> str:
    """The prefix a checkpoint with these tensor names uses. Raises BadCheckpoint."""
    return weights.find_prefix(geometry, prefixes(geometry), tensors)


def attention_tensors(geometry: Geometry, layer: int, prefix: str | None = None) -> dict[str, tuple[int, ...]]:
    """Required checkpoint tensors of the attention sublayer and their shapes; indexer included on a full layer.

    ``prefix`` defaults to the published one. A ``linear`` layer requires none: its tensors belong to another mechanism.
    """
    if _linear(geometry, layer):
        return {}
    names = recipe(geometry.family).tensor_names(geometry, layer)
    shapes = weights.tensor_shapes(geometry, names)
    return {weights.full_name(_prefix(geometry, prefix), layer, suffix): shape for suffix, shape in shapes.items()}


def forbidden_tensors(geometry: Geometry, layer: int, prefix: str | None = None) -> tuple[str, ...]:
    """Beginnings of names that must not exist in ``layer``: an indexer that would not run, a bias or gate no step applies."""
    names = {} if _linear(geometry, layer) else recipe(geometry.family).tensor_names(geometry, layer)
    return weights.forbidden(geometry, layer, _prefix(geometry, prefix), names)


def weight_slices(geometry: Geometry, layer: int, rank: int, ranks: int, prefix: str | None = None) -> dict[str, WeightSlice]:
    """Weights buffer name (``w.q_a`` ...) -> the part of a checkpoint tensor that ``rank`` of ``ranks`` keeps.

    Heads are cut over the ranks, the rest is replicated. Raises Unsupported when ``ranks`` does not divide the heads.
    """
    if ranks < 1 or geometry.heads % ranks or not 0 <= rank < ranks:
        raise Unsupported(
            f"rank {rank} of {ranks}: the {geometry.heads} heads of {geometry.name} must divide evenly over the ranks"
        )
    names = recipe(geometry.family).tensor_names(geometry, layer)
    shapes, share = weights.tensor_shapes(geometry, names), geometry.heads // ranks
    heads = (rank * share, (rank + 1) * share)
    found = {}
    for buffer, suffix in names.items():
        tensor = weights.full_name(_prefix(geometry, prefix), layer, suffix)
        found[f"w.{buffer}"] = weights.cut(geometry, buffer, tensor, shapes[suffix], heads)
    return found


def _prefix(geometry: Geometry, prefix: str | None) -> str:
    return prefixes(geometry)[0] if prefix is None else prefix


def _linear(geometry: Geometry, layer: int) -> bool:
    if not 0 <= layer < geometry.layers:
        raise Unsupported(f"{geometry.name} has layers 0..{geometry.layers - 1}; layer {layer} does not exist")
    return geometry.schedule[layer] == "linear"
