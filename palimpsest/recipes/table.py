"""Name -> recipe module, imported when asked for. Adding a family is one line here."""

import importlib
from pathlib import Path
from typing import Any, Protocol, cast

from palimpsest.core.errors import BadConfig, UnknownName, Unsupported
from palimpsest.core.geometry import Formats, Geometry
from palimpsest.core.spec import Limits, Program

FAMILIES = {
    "kimi_k31": "palimpsest.recipes.kimi_k31",
    "deepseek_v32": "palimpsest.recipes.deepseek_v32",
    "glm_dsa": "palimpsest.recipes.glm_dsa",
}

#: relatives people try, and why each is refused; keys are model types
REFUSED = {
    "deepseek_v2": "its attention is dense",
    "deepseek_v3": "its attention is dense",
    "kimi_k2": "its attention is dense",
    "kimi_k25": "its attention is dense",
    "kimi_linear": "its attention is dense",
    "deepseek_v4": "its attention compresses keys instead of selecting them one by one",
    "glm5_next": "its indexer scores pools of keys (kpool)",
    "glm5_next_text": "its indexer scores pools of keys (kpool)",
}


class Recipe(Protocol):
    """What a family module offers."""

    ARCHITECTURES: tuple[str, ...]
    MODEL_TYPES: tuple[str, ...]
    PREFIXES: tuple[str, ...]

    def geometry(self, config: dict[str, object], name: str) -> Geometry: ...
    def tensor_names(self, geometry: Geometry, layer: int) -> dict[str, str]: ...
    def program(
        self, geometry: Geometry, limits: Limits, formats: Formats, layer: int, *, engine: str = "portable", threads: int = 1
    ) -> Program: ...


def recipe(family: str) -> Recipe:
    """The module of a family. Raises UnknownName."""
    if family not in FAMILIES:
        raise UnknownName("family", family, list(FAMILIES))
    return cast(Recipe, importlib.import_module(FAMILIES[family]))


def family_of(config: dict[str, Any]) -> str:
    """The family of a ``config.json``; ``architectures`` and ``model_type`` must agree. Raises BadConfig and Unsupported."""
    if not isinstance(config, dict):
        raise BadConfig("the configuration must be a JSON object")
    named = config.get("architectures") or []
    model_type = config.get("model_type")
    if not isinstance(named, list) or any(not isinstance(one, str) for one in named):
        raise BadConfig("architectures must be a list of strings")
    if model_type is not None and not isinstance(model_type, str):
        raise BadConfig("model_type must be a string")
    if not named and model_type is None:
        raise BadConfig(f"the configuration names neither architectures nor model_type; {_supported()}")
    by_name = {one: family for family in FAMILIES for one in recipe(family).ARCHITECTURES}
    by_type = {one: family for family in FAMILIES for one in recipe(family).MODEL_TYPES}
    if model_type is not None and model_type not in by_type:
        why = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
        raise Unsupported(f"model_type {model_type!r} is not supported{why}; {_supported()}")
    for one in named:
        if one not in by_name:
            raise Unsupported(f"architecture {one!r} is not supported; {_supported()}")
    found = {by_name[one] for one in named} | ({by_type[model_type]} if model_type is not None else set())
    if len(found) > 1:
        raise BadConfig(
            f"architectures {named} and model_type {model_type!r} name different families: {', '.join(sorted(found))}"
        )
    return found.pop()


def _supported() -> str:
    names = [f"{recipe(family).ARCHITECTURES[0]} ({recipe(family).MODEL_TYPES[0]})" for family in FAMILIES]
    return f"supported: {', '.join(names)}"


def preset_folder() -> Path:
    """Where the built-in configurations lie."""
    return Path(__file__).parent / "presets"


def presets() -> tuple[str, ...]:
    """Names of the built-in configurations."""
    return tuple(sorted(path.stem for path in preset_folder().glob("*.json")))
