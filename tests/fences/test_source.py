"""House rules that a syntax tree can see: sizes, environment reads, unpickling, module state. Each with a planted violation."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "palimpsest").rglob("*.py"))
FILE_LINES, FUNCTION_LINES, PARAMETERS = 500, 60, 8
ENVIRONMENT_OK = ("palimpsest/cli/", "palimpsest/ranks/spawn.py")
BANNED_CALLS = {
    "pickle": "unpickling",
    "cPickle": "unpickling",
    "joblib": "unpickling",
    "dill": "unpickling",
    "torch.load": "unpickling",
    "np.load": "unpickling",
    "numpy.load": "unpickling",
    "torch.jit.load": "native code from a file",
    "torch.export.load": "falls back to pickle",
    "os.system": "a shell",
    "eval": "code from data",
    "exec": "code from data",
    "torch.cuda.mem_get_info": "work sized by free memory",
}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def long_things(name: str, text: str) -> list[str]:
    found = []
    if (lines := text.count("\n") + 1) > FILE_LINES:
        found.append(f"{name}: {lines} lines, at most {FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{name}:{node.lineno} {node.name} has {length} lines, at most {FUNCTION_LINES}")
            args = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
            if len(args) > PARAMETERS or len(args) + len(node.args.kwonlyargs) > PARAMETERS + 4:
                found.append(
                    f"{name}:{node.lineno} {node.name} takes {len(args)} positional of {len(args) + len(node.args.kwonlyargs)}"
                )
    return found


def banned_things(name: str, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{name}:{node.lineno} imports {n}: {BANNED_CALLS[n]}" for n in names if n in BANNED_CALLS]
        if isinstance(node, ast.Call) and dotted(node.func) in BANNED_CALLS:
            found.append(f"{name}:{node.lineno} calls {dotted(node.func)}: {BANNED_CALLS[dotted(node.func)]}")
        if isinstance(node, ast.keyword) and node.arg == "shell" and getattr(node.value, "value", None) is True:
            found.append(f"{name}:{node.lineno} shell=True")
        if (
            isinstance(node, ast.Attribute)
            and dotted(node) in ("os.environ", "os.getenv", "os.putenv")
            and not name.startswith(ENVIRONMENT_OK)
        ):
            found.append(f"{name}:{node.lineno} reads the environment; only {ENVIRONMENT_OK} may")
        if isinstance(node, ast.ExceptHandler) and (node.type is None or dotted(node.type) in ("Exception", "BaseException")):
            reraises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            if not reraises and "# boundary:" not in text.splitlines()[node.lineno - 1]:
                found.append(f"{name}:{node.lineno} broad except that swallows")
    return found


def module_state(name: str, text: str) -> list[str]:
    """Lower-case module-level containers, and ``global`` statements. Constant tables are in upper case."""
    tree, found = ast.parse(text), []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            if (
                isinstance(target, ast.Name)
                and not target.id.isupper()
                and target.id != "__all__"
                and isinstance(node.value, MUTABLE)
            ):
                found.append(f"{name}:{node.lineno} module-level mutable {target.id}")
    found += [f"{name}:{n.lineno} global {n.names}" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    return found


@pytest.mark.parametrize("rule", [long_things, banned_things, module_state])
def test_source_follows(rule) -> None:
    assert len(FILES) >= 60, "the scan saw too few files to mean anything"
    bad = [line for path in FILES for line in rule(str(path.relative_to(ROOT)), path.read_text())]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("rule", "planted"),
    [
        (long_things, "x = 1\n" * 501),
        (long_things, "def f():\n" + "    x = 1\n" * 60),
        (long_things, "def f(a, b, c, d, e, f, g, h, i): ...\n"),
        (banned_things, "import pickle\n"),
        (banned_things, "import torch\ntorch.load('x')\n"),
        (banned_things, "import os\nos.environ['A']\n"),
        (banned_things, "import subprocess\nsubprocess.run('ls', shell=True)\n"),
        (banned_things, "try:\n    x()\nexcept Exception:\n    pass\n"),
        (module_state, "cache = {}\n"),
        (module_state, "def f():\n    global x\n    x = 1\n"),
    ],
)
def test_planted_violation_is_found(rule, planted: str) -> None:
    assert rule("palimpsest/run/planted.py", planted)


def test_every_file_says_what_its_room_is_for() -> None:
    silent = [
        str(p.relative_to(ROOT)) for p in FILES if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent, f"no docstring at the top: {silent}"


def test_first_five_files_stay_short() -> None:
    five = ("core/spec.py", "recipes/blocks.py", "plan/check.py", "run/execute.py", "prove/gates.py")
    total = sum((ROOT / "palimpsest" / f).read_text().count("\n") for f in five)
    assert total <= 1400, f"the five files a newcomer reads first have {total} lines together"
