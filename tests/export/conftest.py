"""Small planned layers and their cores, with the programs run by eager torch: everything but the C++ compiler, in seconds."""

import importlib.util
import shutil
import sys
import warnings
from pathlib import Path

import pytest


def _load(name: str):
    spec = importlib.util.spec_from_file_location(f"palimpsest_export_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small():
    return _load("small")


@pytest.fixture(scope="session")
def compiled(small, tmp_path_factory):
    """One compiled core on two ranks, made once per session by the real workers (minutes): (folder, digest, checkpoint,
    store).
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    return small.prepared(tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="session")
def natives():
    return _load("natives")


@pytest.fixture(scope="session")
def native(small, natives, tmp_path_factory):
    """A compiled core of one native step, made once per session by the real workers."""
    from palimpsest.kernels.detect import available_engines

    if "avx" not in available_engines() or shutil.which("g++") is None:
        pytest.skip("native programs need numba and a C++ compiler")
    return natives.make(small, tmp_path_factory.mktemp("native"))
