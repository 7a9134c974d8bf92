"""Runs prepared cores: torch and the standard library, none of the model or planning code.

``core = load(path, digest)``, ``session = core.bind()``, ``session.prefill(hidden, history)``.
"""

from palimpsest_loader.core import Core, digest_of, load
from palimpsest_loader.errors import BadCore, CapacityError, CommError, CoreError, WrongMachine
from palimpsest_loader.session import Session

__all__ = ["BadCore", "CapacityError", "CommError", "Core", "CoreError", "Session", "WrongMachine", "digest_of", "load"]
