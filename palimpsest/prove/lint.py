"""The rule that no number was picked by hand (gate V5), as a program.

Reads source, never imports it. A finding is a banned name (the usual approximate comparisons and their parameters), a number that
is not whole inside a comparison (a floating-point literal, a power with a negative exponent, a quotient of literals), or a name
in a comparison that the same file sets to a literal other than 0, 1 or 2 with a point. Bounds have to come from sizes and unit
roundoffs.
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


def _is_fraction(node: ast.AST) -> bool:
    """A floating-point literal, ``x ** -n``, or a quotient of two literals."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (float, complex))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return isinstance(node.right, ast.UnaryOp) and isinstance(node.right.op, ast.USub)
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and {type(node.left), type(node.right)} == {ast.Constant}


def _picked_names(tree: ast.AST) -> set[str]:
    """Names (and attributes) that an assignment or a default sets to a literal with a point other than 0, 1 and 2."""
    found = set()
    for node in ast.walk(tree):
        pairs: list[tuple[ast.AST, ast.AST | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.arguments):
            late = node.posonlyargs + node.args
            pairs = list(zip(late[len(late) - len(node.defaults) :], node.defaults, strict=True))
            pairs += list(zip(node.kwonlyargs, node.kw_defaults, strict=True))
        for target, value in pairs:
            number = value.operand if isinstance(value, ast.UnaryOp) else value
            if isinstance(number, ast.Constant) and isinstance(number.value, float) and number.value not in (0, 1, 2):
                found |= {n for part in ast.walk(target) for n in _names(part)}
    return found


def lint_source(text: str, file: str = "<text>") -> list[Finding]:
    """Findings of one file's text, in line order. Raises SyntaxError for text that is not Python."""
    found = []
    tree = ast.parse(text)
    picked = _picked_names(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        names = _names(node)
        called = _getattr_name(node)
        names += [called] if called else []
        found += [Finding(file, line, f"banned name {name!r}") for name in names if name in BANNED]
        if isinstance(node, ast.Compare):
            parts = list(ast.walk(node))
            if any(_is_fraction(part) for part in parts):
                found.append(Finding(file, line, "fraction literal in a comparison"))
            hidden = sorted(picked & {name for part in parts for name in _names(part)})
            found += [Finding(file, line, f"{name!r} is a literal in a comparison") for name in hidden]
    return sorted(found, key=lambda f: (f.file, f.line, f.text))


def lint_package(root: Path) -> tuple[int, list[Finding]]:
    """(files read, findings) over every ``*.py`` below ``root``, ``lint.py`` itself left out because it spells the names."""
    files = sorted(p for p in root.rglob("*.py") if p.name != "lint.py")
    return len(files), [f for p in files for f in lint_source(p.read_text(encoding="utf-8"), p.relative_to(root).as_posix())]
