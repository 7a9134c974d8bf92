"""The sample programs as fixtures: importlib mode puts no test folder on the path."""

import importlib.util
import sys
from pathlib import Path

import pytest


def _load(name: str):
    spec = importlib.util.spec_from_file_location(f"palimpsest_run_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def toy():
    return _load("toy")


@pytest.fixture(scope="session")
def micro():
    return _load("micro")
