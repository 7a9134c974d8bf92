"""config.json as data. Nothing in it is ever imported or run: not ``auto_map``, not ``architectures``. Stdlib only."""

import os
from pathlib import Path
from typing import Any

from palimpsest.checkpoint.strict import open_regular, open_root, read_small, shown, strict_json
from palimpsest.core.errors import BadConfig

NAME = "config.json"
MAX_BYTES = 1 << 20
MAX_DEPTH = 32


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration in ``path``: a checkpoint folder, or a JSON file of that format.

    Raises BadCheckpoint when there is no such regular file of at most 1 MiB, and BadConfig when its text is not plain JSON data:
    an object, at most 32 levels, no key twice, integers within +-2**53, no NaN or Infinity. Unknown keys are kept.
    """
    path = Path(path)
    if path.is_file():
        # the caller named the file itself, so a link to it is the caller's own
        path = Path(os.path.realpath(path))
        folder, name = path.parent, path.name
    else:
        folder, name = path, NAME
    root_fd = open_root(folder)
    try:
        return read_config_at(root_fd, name)
    finally:
        os.close(root_fd)


def read_config_at(root_fd: int, name: str = NAME) -> dict[str, Any]:
    """As ``read_config``, for the regular file ``name`` directly inside the open folder ``root_fd``."""
    fd = open_regular(root_fd, name)
    try:
        data = read_small(fd, name, MAX_BYTES)
    finally:
        os.close(fd)
    value = strict_json(data, name=name, error=BadConfig, depth=MAX_DEPTH, floats=True)
    if not isinstance(value, dict):
        raise BadConfig(f"{shown(name)} holds a JSON {type(value).__name__}, expected an object; give a model's config.json")
    return value


def remote_code(config: dict[str, Any]) -> tuple[str, ...]:
    """Where ``config`` asks for code from its own folder: its ``auto_map`` entries, as text. Reported, never imported."""
    found: list[str] = []
    pending: list[tuple[str, Any]] = [("", config)]
    while pending:
        where, value = pending.pop()
        if not isinstance(value, dict):
            continue
        for key, inner in value.items():
            place = f"{where}.{key}" if where else key
            if key == "auto_map":
                names = inner if isinstance(inner, dict) else {"": inner}
                found += [f"{place}.{kind} -> {target}" if kind else f"{place} -> {target}" for kind, target in names.items()]
            else:
                pending.append((place, inner))
    return tuple(sorted(shown(text, 160)[1:-1] for text in found))
