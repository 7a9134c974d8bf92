"""``palimpsest preflight``: exit codes, what is printed, and that a folder that cannot be compared is a one-line user error."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from palimpsest.checkpoint.make import make
from palimpsest.cli import preflight as verb
from palimpsest.core.errors import UserError


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(argv))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("micro", tmp_path_factory.mktemp("cli") / "micro")


def test_good_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(folder)) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "preflight: ok"
    assert "selecting layers   0, 1" in printed.out
    assert printed.err == ""


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(folder), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["findings"] == []
    assert report["facts"]["topk"] == 8


def test_folder_that_cannot_be_compared(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "nowhere", folder / "config.json", tmp_path):
        with pytest.raises(UserError) as caught:
            run(str(path))
        assert caught.value.exit_code == 2
        assert len(str(caught.value).splitlines()) == 1
    assert capsys.readouterr().out == ""


def test_wrong_weights_exit_2_and_name_the_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make("micro", tmp_path / "m")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert run(str(root)) == 2
    printed = capsys.readouterr().out
    assert "model.layers.2.self_attn.q_a_proj.weight" in printed
    assert "nothing was loaded" in printed.splitlines()[-1]
    assert run(str(root), "--json") == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_reads_headers_without_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom palimpsest.cli.preflight import examine\nassert examine(sys.argv[1]).ok\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
