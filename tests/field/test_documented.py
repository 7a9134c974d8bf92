"""docs/field-cases.md answers every case of A1 to A8: a test that exists, or the mechanism that prevents it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field-cases.md"
CASES = [
    "1.1",
    "1.2",
    "1.4",
    "1.5",
    "1.7",
    "1.8",
    "1.10",
    "1.11",
    "1.13",
    "1.14",
    "1.16",
    "1.17",
    "1.19",
    "1.20",
    "1.22",
    "1.23",
    "1.25",
    "1.26",
    "1.28",
    "1.29",
    "1.31",
    "1.32",
    "2.1",
    "2.2",
    "2.4",
    "2.5",
    "2.7",
    "2.8",
    "2.10",
    "2.11",
    "2.13",
    "2.14",
    "3.1",
    "3.2",
    "3.4",
    "3.5",
    "3.7",
    "3.8",
    "3.10",
    "3.11",
    "3.13",
    "3.14",
    "3.16",
    "3.17",
    "3.19",
    "3.20",
    "3.22",
    "3.23",
    "4.1",
    "4.2",
    "4.4",
    "4.5",
    "4.7",
    "4.8",
    "4.10",
    "4.11",
    "4.13",
    "4.14",
    "4.16",
    "4.17",
    "4.19",
    "5.1",
    "5.2",
    "5.4",
    "5.5",
    "5.7",
    "5.8",
    "6.1",
    "6.2",
    "6.4",
    "6.5",
    "6.7",
    "6.8",
    "6.10",
    "6.11",
    "7.1",
    "7.2",
    "7.4",
    "7.5",
    "8.1",
    "8.2",
    "8.4",
    "8.5",
    "8.7",
    "8.8",
    "8.10",
    "8.11",
]
#: ``file.py::test_name``, the file below tests/
REFERENCE = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows(text: str) -> dict[str, str]:
    """Case number -> the rest of its table row."""
    return {m[1]: m[2] for m in re.finditer(r"^\| (\d\.\d+) \| (.*) \|$", text, re.MULTILINE)}


def dead(text: str, root: Path) -> list[str]:
    """References to tests that do not exist."""
    missing = []
    for file, name in REFERENCE.findall(text):
        path = root / file
        names = (
            {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)} if path.is_file() else set()
        )
        if name not in names:
            missing.append(f"{file}::{name}")
    return missing


def test_every_case_has_an_answer() -> None:
    found = rows(PAGE.read_text())
    assert sorted(found) == sorted(CASES)
    unanswered = [case for case, answer in found.items() if not REFERENCE.search(answer) and "prevented:" not in answer]
    assert unanswered == []


def test_every_test_it_names_exists() -> None:
    assert len(REFERENCE.findall(PAGE.read_text())) > len(CASES)
    assert dead(PAGE.read_text(), ROOT / "tests") == []


def test_a_dead_reference_is_found() -> None:
    assert dead("`field/test_documented.py::test_no_such_thing` and `no/such.py::test_x`", ROOT / "tests") == [
        "field/test_documented.py::test_no_such_thing",
        "no/such.py::test_x",
    ]


def test_every_numbered_test_is_in_the_page() -> None:
    text = PAGE.read_text()
    for path in sorted(Path(__file__).parent.glob("test_a[1-8]_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert f"`field/{path.name}::{node.name}`" in text, node.name
