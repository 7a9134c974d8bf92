"""Runs a behaviour on in-process ranks or on real ones, under one name."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palimpsest.ranks.local import run_local
from palimpsest.ranks.spawn import spawn

HERE = Path(__file__).parent


@functools.cache
def _behaviours() -> Any:
    spec = importlib.util.spec_from_file_location("behaviours", HERE / "behaviours.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _pipes() -> int:
    """Pipes and process descriptors this process holds."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(name.startswith(("pipe:", "anon_inode:")) for name in names)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Any]]:
    """``real(size, behaviour, config, **options) -> values``; checks that nothing is left, however it ended."""
    monkeypatch.syspath_prepend(str(HERE))

    def run(size: int, name: str, config: dict[str, Any] | None = None, **options: Any) -> list[Any]:
        work = tmp_path / "ranks"
        work.mkdir(exist_ok=True)
        pipes, shared = _pipes(), set(os.listdir("/dev/shm"))
        try:
            exits = spawn(size, f"behaviours:{name}", config or {}, workdir=work, **options)
        finally:
            assert list(work.iterdir()) == []
            assert _pipes() == pipes
            assert set(os.listdir("/dev/shm")) <= shared
        assert [each.rank for each in exits] == list(range(size))
        return [each.value for each in exits]

    return run


@pytest.fixture
def local() -> Callable[..., list[Any]]:
    def run(size: int, name: str, config: dict[str, Any] | None = None, **options: Any) -> list[Any]:
        behaviour = getattr(_behaviours(), name)
        on_event = options.get("on_event")

        def main(comm: Any) -> Any:
            return behaviour(comm, config or {}, lambda event: on_event(comm.rank, event) if on_event else None)

        return run_local(size, main, seed=options.get("seed", 0))

    return run


@pytest.fixture(params=["local", pytest.param("real", marks=pytest.mark.ranks)])
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Both transports."""
    return request.getfixturevalue(request.param)
