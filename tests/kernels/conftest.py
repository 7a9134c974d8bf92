"""One torch thread, as in a rank, and the harness importable by name."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine(request, monkeypatch):
    """The engine of ``engines.SELECTING``; "avx" with the kernels named behind it."""
    name, *kernels = request.param.split()
    if kernels:
        from palimpsest.kernels.index_select import avx

        monkeypatch.setattr(avx, "KERNELS", getattr(avx, *kernels)())
    return name
