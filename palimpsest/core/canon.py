"""Canonical text and digest of any spec value.

Canonical JSON: UTF-8, sorted keys, no spaces, integers and strings only. A float becomes its hexadecimal form, so that
two texts are equal exactly when the values are. Frozen dataclasses become objects tagged with nothing: the reader knows the type.
"""

import dataclasses
import hashlib
import json
from typing import Any


def plain(value: Any) -> Any:
    """``value`` as dicts, lists, strings, integers, booleans and None. Raises TypeError for anything else."""
    if value is None or type(value) in (str, int, bool):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no canonical form")


def canonical(value: Any) -> str:
    """The canonical JSON text of ``value``."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """sha256 of the canonical text, in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()
