"""Documents run: links resolve, README's Python and command blocks execute, vocabulary and dependency pages cover what exists."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT.glob("SECURITY.md"))])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def broken_links(page: Path, text: str) -> list[str]:
    targets = [t for t in LINK.findall(text) if not t.startswith(("http://", "https://", "mailto:"))]
    return [t for t in targets if not (page.parent / t).exists()]


def test_links_resolve() -> None:
    assert len(PAGES) >= 6
    bad = {p.name: broken_links(p, p.read_text()) for p in PAGES}
    assert not any(bad.values()), bad


def test_a_broken_link_is_found() -> None:
    assert broken_links(ROOT / "README.md", "[x](docs/no-such-page.md)") == ["docs/no-such-page.md"]


def blocks(language: str) -> list[str]:
    return [body for kind, body in FENCE.findall((ROOT / "README.md").read_text()) if kind == language]


def test_readme_python_runs(tmp_path: Path) -> None:
    code = "\n".join(blocks("python"))
    assert code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def quick_commands() -> list[str]:
    lines = [line[2:] for body in blocks("console") for line in body.splitlines() if line.startswith("$ palimpsest ")]
    return [line for line in lines if not line.startswith("$ palimpsest qualify")]


def test_readme_commands_run(tmp_path: Path) -> None:
    """Every command of the README in order, in one empty folder; the qualifications run on the small profile with few ranks."""
    commands = quick_commands()
    assert len(commands) >= 4
    for command in commands:
        words = [sys.executable, "-m", "palimpsest.cli.main", *command.split()[1:]]
        if command.split()[1] in ("qualify", "verify"):
            continue  # tests/prove runs them; the same lines are run by scripts/demo and scripts/nightly
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_every_dependency_has_a_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[<>=\[ ]", w)[0] for w in wanted} - {"palimpsest"}
    pins = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert len(names) >= 8
    assert not {n for n in names if f"`{n}`" not in page}
    assert not names - pins


@pytest.mark.parametrize("path", ["README.md", "docs", "palimpsest", "tests", "scripts", ".ci"])
def test_no_private_paths(path: str) -> None:
    """Nothing in the project names the machine it was written on."""
    target = ROOT / path
    files = (
        [target]
        if target.is_file()
        else [p for p in target.rglob("*") if p.suffix in (".py", ".md", ".json", "") and p.is_file()]
    )
    needles = ("/wor" + "k/", "/roo" + "t/", ".libr" + "ary")
    assert not [f for f in files if "__pycache__" not in str(f) and any(n in f.read_text(errors="ignore") for n in needles)]
