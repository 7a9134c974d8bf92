"""Palimpsest plans, proves and runs long-context sparse-attention (DSA) prefill in the smallest fixed memory.

    from palimpsest import Formats, Limits, compare, fit, load_geometry, plan

The names below are the planning API (``palimpsest.api``), loaded when first used: importing this package imports neither torch
nor numpy, and no other module of it. ``python -m palimpsest.cli.main --help`` lists what the command line does.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palimpsest.api import (
        Deployment,
        Formats,
        Geometry,
        Limits,
        Planned,
        compare,
        fit,
        load_geometry,
        plan,
    )

__version__ = "0.1.0"

__all__ = ["Deployment", "Formats", "Geometry", "Limits", "Planned", "__version__", "compare", "fit", "load_geometry", "plan"]


class _PlanPackage(ModuleType):
    """``palimpsest.plan`` is a package and, called, the function ``palimpsest.api.plan``: one word for the verb and its room."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("palimpsest.api").plan(*args, **kwargs)


class _Package(ModuleType):
    """Importing any ``palimpsest.plan.x`` binds the package's attribute ``plan``; from then on it must be callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "plan" and type(value) is ModuleType:
            value.__class__ = _PlanPackage
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "plan":
            return importlib.import_module("palimpsest.plan")
        if name in __all__:
            return getattr(importlib.import_module("palimpsest.api"), name)
        raise AttributeError(f"module 'palimpsest' has no attribute {name!r}; it has {', '.join(__all__)}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
