"""No unpickling, no code and no archive from a file: the whole package, by its syntax trees, and planted faults."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from palimpsest.checkpoint.index import open_checkpoint
from palimpsest.checkpoint.make import make
from palimpsest.cli.preflight import examine
from palimpsest.core.errors import BadCheckpoint
from palimpsest.prove.qualify import Request, prepare_setup

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "palimpsest").rglob("*.py"))
#: modules that turn bytes into objects or code, unpack archives, or reach the network
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "zipfile",
    "tarfile",
    "yaml",
    "multiprocessing",
    "imp",
    "runpy",
    "code",
    "urllib.request",
    "requests",
    "httpx",
    "huggingface_hub",
    "transformers",
    "torch.hub",
    "torch.package",
}
CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.hub.load",
    "np.load",
    "numpy.load",
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "os.execv",
    "subprocess.getoutput",
    "pickle.loads",
    "marshal.loads",
    "torch.distributed.send_object_list",
    "dist.all_gather_object",
    "dist.broadcast_object_list",
    "dist.gather_object",
    "dist.scatter_object_list",
    "dist.recv_object_list",
}
#: where a module is imported by a name that is not written there: our own tables, and what the user typed after --kernel
DYNAMIC = {
    "cli/main.py",
    "kernels/table.py",
    "recipes/table.py",
    "ranks/template.py",
    "prove/foreign.py",
    "plan/omni.py",
    "report/picture.py",
    "api.py",
    "__init__.py",
}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def violations(name: str, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            found += [f"{where} imports {a.name}" for a in node.names if a.name in MODULES or a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{where} imports {node.module}"] * (node.module in MODULES or node.module.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            found += _bad_call(where, name, node)
    return found


def _bad_call(where: str, name: str, node: ast.Call) -> list[str]:
    called = dotted(node.func)
    if called in CALLS:
        return [f"{where} calls {called}"]
    if (
        called.endswith(("import_module", "spec_from_file_location"))
        and name not in DYNAMIC
        and not isinstance(node.args[0], ast.Constant)
    ):
        return [f"{where} imports a module by a computed name"]
    if called.endswith((".recv", ".recv_obj")) and not called.startswith(("dist.", "torch.distributed.")):
        return [f"{where} calls {called}, which may unpickle"]
    if called.startswith("subprocess.") and called.split(".")[1] in ("run", "Popen", "call", "check_call", "check_output"):
        shell = any(k.arg == "shell" and getattr(k.value, "value", True) for k in node.keywords)
        words = node.args[0] if node.args else None
        if shell or isinstance(words, ast.Constant | ast.JoinedStr) or words is None:
            return [f"{where} gives {called} a string or a shell"]
    return []


def test_the_package_follows() -> None:
    assert len(FILES) > 80
    bad = [line for path in FILES for line in violations(str(path.relative_to(ROOT / "palimpsest")), path.read_text())]
    assert bad == []


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "from multiprocessing.connection import Client",
        "import zipfile",
        "import transformers",
        "eval('1')",
        "connection.recv()",
        "import importlib\nimportlib.import_module(name)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run(f'ls {x}')",
        "import os\nos.system('ls')",
        "from torch import distributed as dist\ndist.all_gather_object(a, b)",
    ],
)
def test_a_planted_violation_is_found(planted: str) -> None:
    assert violations("run/planted.py", planted)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A good checkpoint that asks for code of its own, everywhere a loader could look; and the marker it would make."""
    root = make("tiny-dsv32", tmp_path_factory.mktemp("hostile") / "model")
    marker = root / "marker"
    code = f"open({str(marker)!r}, 'w').write('ran')\n"
    for name in (
        "modeling_x.py",
        "configuration_x.py",
        "__init__.py",
        "conftest.py",
        "sitecustomize.py",
        "torch.py",
        "numpy.py",
        "json.py",
    ):
        (root / name).write_text(code)
    config = json.loads((root / "config.json").read_text())
    config |= {
        "auto_map": {
            "AutoConfig": "configuration_x.X",
            "AutoModel": "modeling_x.X",
            "AutoModelForCausalLM": "someone/repo--modeling_x.X",
        },
        "trust_remote_code": True,
        "custom_pipelines": {"x": {"impl": "modeling_x.X"}},
        "_attn_implementation": "modeling_x",
    }
    (root / "config.json").write_text(json.dumps(config))
    return root, marker


def test_auto_map_never_runs(hostile: tuple[Path, Path]) -> None:
    root, marker = hostile
    report = examine(str(root))
    assert report.ok
    assert not marker.exists()


def test_auto_map_is_reported(hostile: tuple[Path, Path]) -> None:
    from palimpsest.checkpoint.config import read_config, remote_code

    found = remote_code(read_config(hostile[0]))
    assert any("modeling_x.X" in line for line in found)


@pytest.mark.parametrize("verb", [["preflight"], ["plan", "--context", "64K"]])
def test_auto_map_never_runs_from_the_command_line(hostile: tuple[Path, Path], verb: list[str]) -> None:
    """Even with the checkpoint's folder as the working directory."""
    root, marker = hostile
    words = [sys.executable, "-P", "-m", "palimpsest.cli.main", verb[0], ".", *verb[1:]]
    done = subprocess.run(
        words, cwd=root, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


def test_auto_map_never_runs_in_a_qualification(hostile: tuple[Path, Path], tmp_path: Path) -> None:
    """Everything the parent does before ranks start; the ranks read the same files through the same readers."""
    root, marker = hostile
    prepare_setup(Request(model=root, ranks=2), root, tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "start"), [("pytorch_model.bin", b"\x80\x02"), ("model.pt2", b"PK\x03\x04"), ("model.npy", b"\x93NUMPY")]
)
def test_other_formats_are_refused_by_name_and_by_magic(
    hostile: tuple[Path, Path], tmp_path: Path, name: str, start: bytes
) -> None:
    """As the only weights, and under a safetensors name: pickles, exported programs, NumPy files."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(hostile[0] / "config.json", folder)
    (folder / name).write_bytes(start + bytes(64))
    with pytest.raises(BadCheckpoint):
        open_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(start + bytes(64))
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        open_checkpoint(folder)
