"""Who may import whom, as data. An unknown package fails, and so does a scan that saw too little.

``ALLOWED`` maps a package (longest prefix wins) to the packages it may import; ``NO_TORCH`` lists what must stay importable
without torch and numpy.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "palimpsest"

CONTRACTS = ("palimpsest.core", "palimpsest.kernels.sizes")
RUNTIME = ("core", "plan", "kernels", "ranks", "checkpoint", "recipes")
ALLOWED = {
    "palimpsest": ("palimpsest.api",),
    "palimpsest.api": ("palimpsest.core", "palimpsest.plan", "palimpsest.recipes", "palimpsest.report"),
    "palimpsest.core": ("palimpsest.core",),
    "palimpsest.plan": ("palimpsest.core", "palimpsest.plan"),
    "palimpsest.checkpoint": ("palimpsest.core", "palimpsest.checkpoint"),
    "palimpsest.ranks.layout": ("palimpsest.core",),
    "palimpsest.ranks": ("palimpsest.core", "palimpsest.ranks"),
    "palimpsest.kernels.sizes": (),
    "palimpsest.kernels.*.contract": CONTRACTS,
    "palimpsest.kernels": ("palimpsest.core", "palimpsest.kernels", "palimpsest.ranks"),
    "palimpsest.recipes": (
        "palimpsest.core",
        "palimpsest.ranks.layout",
        *CONTRACTS,
        "palimpsest.kernels.*.contract",
        "palimpsest.recipes",
    ),
    "palimpsest.run": tuple(f"palimpsest.{p}" for p in (*RUNTIME, "run")),
    "palimpsest.prove.oracle": ("palimpsest.core", "palimpsest.prove"),
    "palimpsest.prove.ties": ("palimpsest.core", "palimpsest.prove"),
    "palimpsest.prove.exact": ("palimpsest.core", "palimpsest.prove"),
    "palimpsest.prove.bounds": ("palimpsest.core", "palimpsest.prove"),
    "palimpsest.prove.verify": ("palimpsest.core", "palimpsest.prove"),
    "palimpsest.prove": (*(f"palimpsest.{p}" for p in (*RUNTIME, "run", "prove", "report")), "palimpsest"),
    "palimpsest.export": tuple(f"palimpsest.{p}" for p in (*RUNTIME, "run", "export", "prove")),
    "palimpsest.report": ("palimpsest.core", "palimpsest.plan", "palimpsest.report", "palimpsest.prove"),
    "palimpsest.cli": ("palimpsest",),
}
#: single arrows that the table would refuse, each with its reason
EXCEPTIONS = {
    # the pure geometry functions live in recipes; reading the file is checkpoint's job and is imported inside load_geometry
    ("palimpsest.recipes", "palimpsest.checkpoint.config"),
}
BANNED = {
    ("palimpsest.plan.check", "palimpsest.plan.place"),
    ("palimpsest.plan.check", "palimpsest.plan.lifetime"),
    ("palimpsest.prove.oracle", "palimpsest.prove.qualify"),
    ("palimpsest.prove.verify", "palimpsest.prove.qualify"),
}
NO_TORCH = ("palimpsest.core", "palimpsest.plan", "palimpsest.recipes", "palimpsest.ranks.layout", "palimpsest.checkpoint.header",
            "palimpsest.prove.verify", "palimpsest.api")  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, module: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; write the full name"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=False))


def rule_for(module: str) -> tuple[str, ...]:
    fitting = [p for p in ALLOWED if p != "palimpsest" and matches(module, p)]
    if module == "palimpsest":
        return ALLOWED["palimpsest"]
    assert fitting, f"{module} belongs to no package in ALLOWED: add it to the table and to docs/architecture.md"
    return ALLOWED[max(fitting, key=lambda p: (p.count("."), len(p)))]


def violations(module: str, names: set[str], known: set[str]) -> list[str]:
    targets = {n for n in names if n in known}
    allowed = rule_for(module)
    bad = []
    for target in sorted(targets - {module, "palimpsest"}):
        excepted = any(matches(module, a) and matches(target, b) for a, b in EXCEPTIONS)
        package_only = any(other != target and other.startswith(target + ".") for other in targets)
        if any((module, target) == ban for ban in BANNED) or not (
            excepted or package_only or any(matches(target, a) for a in allowed)
        ):
            bad.append(f"{module} -> {target}")
    return bad


def test_arrows_point_left() -> None:
    found = modules()
    assert len(found) >= 60, "the scan saw too few modules to mean anything"
    bad = [v for name, path in found.items() for v in violations(name, imported(path, name), set(found))]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("palimpsest.plan.check", "palimpsest.plan.place"),
        ("palimpsest.prove.oracle", "palimpsest.kernels.table"),
        ("palimpsest.core.spec", "palimpsest.plan.plan"),
        ("palimpsest.recipes.blocks", "palimpsest.kernels.table"),
        ("palimpsest.run.execute", "palimpsest.prove.oracle"),
    ],
)
def test_planted_arrow_is_found(module: str, target: str) -> None:
    assert violations(module, {target}, {module, target})


def test_unknown_package_is_refused() -> None:
    with pytest.raises(AssertionError, match="belongs to no package"):
        rule_for("palimpsest.novelty.thing")


@pytest.mark.parametrize("package", NO_TORCH)
def test_imports_without_torch_or_numpy(package: str) -> None:
    names = [m for m in modules() if matches(m, package)]
    assert names
    code = f"import sys, importlib\nfor m in {names!r}: importlib.import_module(m)\n"
    code += "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_torch_fence_can_fail() -> None:
    code = "import sys, palimpsest.kernels.call\nprint([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "torch" in done.stdout
