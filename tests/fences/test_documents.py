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


def commands() -> list[tuple[str, list[str]]]:
    """Every ``$ palimpsest`` line of the README's console blocks, with the output lines shown under it."""
    found: list[tuple[str, list[str]]] = []
    for body in blocks("console"):
        for line in body.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.strip() not in ("", "..."):
                found[-1][1].append(line)
    return found


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_readme_commands_run_and_print_what_is_shown(tmp_path: Path) -> None:
    """In order, in one empty folder. Qualifications are left to tests/prove and scripts/demo: they take minutes."""
    listed = commands()
    assert len(listed) >= 7
    ran = 0
    for command, shown in listed:
        words = [sys.executable, "-m", "palimpsest.cli.main", *command.split()[1:]]
        if command.split()[1] in ("qualify", "verify"):
            continue
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        printed = squeezed(done.stdout)
        assert not [line for line in shown if squeezed(line) not in printed], f"{command} prints\n{done.stdout}"
        ran += 1
    assert ran >= 5


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
