"""The micro model as a fixture: importlib mode puts no test folder on the path."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def m0():
    spec = importlib.util.spec_from_file_location("palimpsest_field_m0", Path(__file__).with_name("m0.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
