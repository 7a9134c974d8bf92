"""``qualify --kernel``, ``qualify --html`` and ``report``: what is wrong is said in one line, before anything runs."""

import sys
from pathlib import Path

import pytest

from palimpsest.cli.main import main


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The current folder becomes importable with --kernel; not for the tests after this one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--kernel", "index_select"], "OP=module:function is wanted"),
        (["--kernel", "index_select=no_such_module_here:f"], "importing no_such_module_here failed with ModuleNotFoundError"),
        (["--kernel", "index_select=mine:missing"], "mine has no function missing"),
        (
            ["--kernel", "index_select=mine:f"],
            "takes (a, b); (call, chunk) or (keys, scales, query, weights, visible, topk)",
        ),
        (["--html", "nowhere/report.html"], "folder 'nowhere' does not exist"),
    ],
)
def test_one_line_and_exit_2(words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def f(a, b):\n    return a\n")
    assert main(["qualify", *words]) == 2
    said = capsys.readouterr()
    assert text in said.err
    assert said.err.count("\n") == 1
    assert not (tmp_path / "evidence").exists()


def test_a_folder_that_is_no_evidence_has_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 1
    assert "is missing" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
