"""Loading: digest or trust, every file verified and named, requests refused before a byte is touched, the CLI's one-line
errors.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import palimpsest_loader
from palimpsest.ranks.local import run_local
from palimpsest_loader import BadCore, CapacityError, CoreError, digest_of, load
from palimpsest_loader.cli import main
from palimpsest_loader.errors import WrongMachine
from palimpsest_loader.manifest import read, seal
from palimpsest_loader.weights import Weights

PACKAGE = Path(palimpsest_loader.__file__).parent


def test_digest_or_trust_is_required(folder) -> None:
    with pytest.raises(CoreError, match=r"native code.*digest"):
        load(folder)


def test_another_digest_is_refused(folder) -> None:
    with pytest.raises(BadCore, match=digest_of(folder)):
        load(folder, "0" * 64)


def test_file_that_is_no_program_is_refused_not_crashed(folder) -> None:
    with pytest.raises(BadCore, match="no program that torch"):
        load(folder, digest_of(folder))


@pytest.mark.parametrize("name", ["weights/rank0.safetensors", "programs/" + "0" * 24 + ".so"])
def test_flipped_byte_and_missing_file_are_named(folder, name: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadCore, match=name.replace(".", r"\.")):
        load(folder, trust=True)
    path.write_bytes(data[:-1])
    with pytest.raises(BadCore, match="size or sha256"):
        load(folder, trust=True)
    path.unlink()
    with pytest.raises(BadCore, match="No such file"):
        load(folder, trust=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "1.0.0"}, r"torch 1\.0\.0"),
        ({"machine": "m68k"}, "m68k"),
        ({"isa": "avx1024", "cpu_flags": ["avx1024"]}, "avx1024"),
    ],
)
def test_core_of_another_machine_is_refused_whole(folder, change, message: str) -> None:
    """A sealed manifest, valid but for what it was made for: refused before any other file is opened."""
    tree = read((folder / "manifest.json").read_bytes())
    tree["environment"] |= change
    (folder / "manifest.json").write_bytes(seal(tree))
    shutil.rmtree(folder / "programs")
    with pytest.raises(WrongMachine, match=message):
        load(folder, digest_of(folder))


def test_missing_weight_is_named(small, tmp_path) -> None:
    one = small.planned()
    tree = one.tree()
    small.session(one, tree, Rank(0, 1), tmp_path)
    tensors = dict(tree["weights"]["tensors"]) | {"w.absent": {"dtype": "bf16", "shape": [4]}}
    with pytest.raises(BadCore, match=r"w.absent is missing"):
        Weights(tmp_path / "weights0", "weights0", tensors)
    wrong = {name: fact | {"shape": [1]} for name, fact in tree["weights"]["tensors"].items()}
    with pytest.raises(BadCore, match="the manifest says"):
        Weights(tmp_path / "weights0", "weights0", wrong)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, b"\x10" + b"\0" * 7, b"\x02" + b"\0" * 7 + b"{}", (1 << 62).to_bytes(8, "little") + b"{}"]
)
def test_damaged_weight_file_is_refused(tmp_path, data: bytes) -> None:
    path = tmp_path / "w"
    path.write_bytes(data)
    with pytest.raises(BadCore, match="w"):
        Weights(path, "w", {"a": {"dtype": "fp32", "shape": [1]}})


class Rank:
    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def agree(self, label, text) -> None: ...

    def enter(self, phase) -> None: ...


def test_requests_are_refused_before_a_byte_is_touched(small, tmp_path) -> None:
    one = small.planned()

    def body(comm):
        session = small.session(one, one.tree(), comm, tmp_path)
        rows = torch.zeros(40, one.hidden)
        for arguments, kind, message in (
            ((rows, 0), CapacityError, "40 rows in one chunk, 32"),
            ((rows[:2], 255), CapacityError, "256 are prepared"),
            ((rows[:2], -1), CapacityError, "history"),
            ((rows[:2, :3], 0), CoreError, "shape"),
            ((rows[:2].double(), 0), CoreError, "float64"),
        ):
            with pytest.raises(kind, match=message):
                session.prefill(*arguments)
        with pytest.raises(CoreError, match="given"):
            session.prefill(rows[:2], 0, ids=torch.zeros(2, 2, dtype=torch.int32))
        assert not any(segment.raw.any() for segment in session.segments.values())
        session.close()
        with pytest.raises(CoreError, match="closed"):
            session.prefill(rows[:2], 0)

    run_local(1, body)


def test_loader_imports_torch_and_nothing_of_palimpsest(folder) -> None:
    code = (
        "import sys, palimpsest_loader, palimpsest_loader.cli, palimpsest_loader.comm\n"
        f"try: palimpsest_loader.load({str(folder)!r}, trust=True)\n"
        "except palimpsest_loader.BadCore as e: print(type(e).__name__)\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'palimpsest' or m.startswith(('torch._dynamo', 'torch._inductor'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.splitlines()[0] == "BadCore"
    assert done.stdout.splitlines()[1] == "[]"


def test_source_imports_only_torch_and_the_standard_library() -> None:
    import ast

    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                top = name.split(".")[0]
                assert top in ("torch", "palimpsest_loader") or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_command_line_says_one_line(folder, capsys) -> None:
    assert main(["digest", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == digest_of(folder)
    assert main(["run", str(folder), "--digest", "0" * 64]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["verify", str(folder / "none"), "--trust"]) == 2
