"""The rule that no number was picked by hand (gate V5), as a program.

Reads source, never imports it. A finding is a banned name (the usual approximate comparisons and their parameters) or a
floating-point literal inside a comparison. Bounds have to come from sizes and unit roundoffs with names.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

#: approximate comparisons and their parameters, by name
BANNED = frozenset(
    [
        *("allclose", "isclose", "assert_close", "assert_allclose", "assert_almost_equal", "assert_array_almost_equal"),
        *("assertAlmostEqual", "approx", "atol", "rtol", "abs_tol", "rel_tol", "tol", "tolerance"),
    ]
)


@dataclass(frozen=True)
class Finding:
    """Where and what: ``file:line: text``."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def _names(node: ast.AST) -> list[str]:
    """Every name a node spells: uses, attributes, keywords, parameters, imports, definitions, and strings that are one name
    (getattr)."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, (ast.keyword, ast.arg)):
        return [node.arg] if node.arg else []
    if isinstance(node, ast.alias):
        return [*node.name.split("."), *([node.asname] if node.asname else [])]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    return []


def _getattr_name(node: ast.AST) -> str | None:
    """The name in ``getattr(x, "name")``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
        wanted = node.args[1]
        if isinstance(wanted, ast.Constant) and isinstance(wanted.value, str):
            return wanted.value
    return None


def _has_float(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Constant) and isinstance(n.value, (float, complex)) for n in ast.walk(node))


def lint_source(text: str, file: str = "<text>") -> list[Finding]:
    """Findings of one file's text, in line order. Raises SyntaxError for text that is not Python."""
    found = []
    for node in ast.walk(ast.parse(text)):
        line = getattr(node, "lineno", 0)
        names = _names(node)
        called = _getattr_name(node)
        names += [called] if called else []
        found += [Finding(file, line, f"banned name {name!r}") for name in names if name in BANNED]
        if isinstance(node, ast.Compare) and _has_float(node):
            found.append(Finding(file, line, "floating-point literal in a comparison"))
    return sorted(found, key=lambda f: (f.file, f.line, f.text))


def lint_package(root: Path) -> tuple[int, list[Finding]]:
    """(files read, findings) over every ``*.py`` below ``root``, ``lint.py`` itself left out because it spells the names."""
    files = sorted(p for p in root.rglob("*.py") if p.name != "lint.py")
    return len(files), [f for p in files for f in lint_source(p.read_text(encoding="utf-8"), p.relative_to(root).as_posix())]
