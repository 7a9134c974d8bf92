"""The small cores of tests/export, for the loader's refusals."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small():
    path = Path(__file__).parents[1] / "export" / "small.py"
    spec = importlib.util.spec_from_file_location("palimpsest_export_small", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def good(small):
    return small.planned(ranks=2, rows=128).tree()


@pytest.fixture
def tree(good):
    """The manifest of a two-rank core as a value to change."""
    return copy.deepcopy(good)


@pytest.fixture
def folder(small, tmp_path):
    """A core folder that is whole but for its programs, which are no shared objects: (path, planned)."""
    import hashlib

    from palimpsest.export import manifest
    from palimpsest.export.weights import write_weights

    one = small.planned()
    core = tmp_path / "core"
    (core / "weights").mkdir(parents=True)
    (core / "programs").mkdir()
    write_weights(core / "weights" / "rank0.safetensors", one.program, one.fill, 0)
    (core / manifest.program_file("0" * 64)).write_bytes(b"no shared object")
    made = {name: manifest.Compiled("0" * 64, "0" * 64, 0) for name in one.built.functions}
    names = ["weights/rank0.safetensors", manifest.program_file("0" * 64)]
    files = {
        n: {"sha256": hashlib.sha256((core / n).read_bytes()).hexdigest(), "bytes": (core / n).stat().st_size} for n in names
    }
    data = manifest.encode(manifest.tree(one.program, one.plan, one.built, made, small.ENVIRONMENT, files, names[:1]))
    (core / "manifest.json").write_bytes(data)
    return core
