"""``palimpsest checkpoint``: make and list."""

import argparse
from pathlib import Path

import pytest

from palimpsest.checkpoint.index import open_checkpoint
from palimpsest.checkpoint.make import PRESETS
from palimpsest.cli import checkpoint as verb
from palimpsest.core.errors import BadConfig, UnknownName


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(argv))


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in PRESETS)


def test_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("make", "micro", str(tmp_path / "m")) == 0
    assert "51 tensors" in capsys.readouterr().out
    assert len(open_checkpoint(tmp_path / "m").tensors) == 51


def test_seed(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        run("make", "micro", str(tmp_path / name), "--seed", seed)
    shard = "model-00001-of-00002.safetensors"
    a, b, c = ((tmp_path / name / shard).read_bytes() for name in "abc")
    assert a == b != c


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="micro"):
        run("make", "nope", str(tmp_path / "m"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(BadConfig, match="not empty"):
        run("make", "micro", str(tmp_path / "full"))
