"""Small checkpoint folders to damage: a plain two-shard one of a few bytes, and real presets made once per session."""

import json
import shutil
from pathlib import Path

import pytest

from palimpsest.checkpoint import make as making


@pytest.fixture(scope="session")
def presets(tmp_path_factory: pytest.TempPathFactory):
    """preset name -> folder, made at first use. Treat as read-only."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = making.make(name, tmp_path_factory.mktemp("presets") / name)
        return made[name]

    return folder


@pytest.fixture
def copy(presets, tmp_path: Path):
    """A private copy of a preset, to damage."""

    def fresh(name: str) -> Path:
        return Path(shutil.copytree(presets(name), tmp_path / name))

    return fresh


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Two shards, three tensors, an index, a config."""
    root = tmp_path / "plain"
    root.mkdir()
    shards = {
        "a.safetensors": {"x": ("F32", (2, 3), bytes(range(24))), "y": ("BF16", (5,), bytes(10))},
        "b.safetensors": {"z": ("U8", (7,), b"1234567")},
    }
    for file, tensors in shards.items():
        making.write_safetensors(root / file, tensors, {})
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 41}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "config.json").write_text('{"model_type": "plain"}')
    return root
