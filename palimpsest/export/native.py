"""Native programs: stages whose fast form is a numba kernel. What one is, its template, its store key, its compile job.

A native program is object code of this package's compiled kernels behind one C function (docs/format.md, "C ABI"). Its template
names the kernel and the views it takes; the code itself is made by ``palimpsest.export.native_worker`` from the kernels' sources,
which are therefore in the key.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from palimpsest.core.canon import canonical
from palimpsest.core.errors import BadConfig
from palimpsest.export.spec import Argument
from palimpsest.export.toolchain import Toolchain
from palimpsest.kernels import detect, sizes

#: names the template text
FORMAT = "palimpsest-native-1"
#: engines whose index_select can be exported so, and the kernels of one
ENGINES = ("avx", "amx")
KERNELS = ("index_select.tile", "index_select.emit")


@dataclass(frozen=True)
class Native:
    """engine: whose kernels; kernel: one of ``KERNELS``; numbers: topk, heads, dim, rows, keys and scratch, held by the code."""

    engine: str
    kernel: str
    numbers: dict[str, int]


@dataclass(frozen=True)
class Target:
    """What the code is compiled for. cpu, features: LLVM's names; flags: those of /proc/cpuinfo that a machine needs."""

    cpu: str
    features: str
    flags: tuple[str, ...]


#: LLVM's features that /proc/cpuinfo spells otherwise
_FLAGS = {"bmi": "bmi1", "avx512bf16": "avx512_bf16", "amx-tile": "amx_tile", "amx-bf16": "amx_bf16"}
_FEATURES = {flag: feature for feature, flag in _FLAGS.items()}
#: what an engine's kernels use: where the compile target has it (avx), or always (amx)
_WANTED = {
    engine: tuple(_FLAGS.get(one, one) for one in features)
    for engine, features in (("avx", detect.AVX512_FEATURES), ("amx", detect.AMX_FEATURES))
}


def target(engine: str, flags: Sequence[str], here: frozenset[str]) -> Target:
    """The compile target: an instruction set's ``flags``, and of the engine's own sets those this processor (``here``) has.

    amx has no form without its sets, so they are always in its target.
    """
    wide = "avx512f" in flags
    more = [one for one in _WANTED[engine] if engine == "amx" or (wide and one in here)]
    every = tuple(sorted({*flags, *more}))
    return Target("x86-64", ",".join(f"+{_FEATURES.get(one, one)}" for one in every), every)


def of_tools(engine: str, tools: Toolchain) -> Target:
    """The target of ``tools``: the plain instruction set when somebody named it, else with what this machine has above it."""
    return target(engine, tools.flags, tools.here if tools.widest else frozenset())


def template(name: str, native: Native, args: Sequence[Argument]) -> bytes:
    """The template text. Raises BadConfig for an argument that is not dense: the code knows no strides."""
    signatures = [argument.signature() for argument in args]
    for one in signatures:
        if one["stride"] != dense(one["size"]):
            raise BadConfig(f"stage {name}: a native program takes dense views, not size {one['size']} stride {one['stride']}")
    tree = {"format": FORMAT, "name": name, "engine": native.engine, "kernel": native.kernel, "numbers": native.numbers,
            "args": signatures, "exact": True}  # fmt: skip
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def dense(size: Sequence[int]) -> list[int]:
    """Strides of a dense tensor."""
    strides, at = [], 1
    for extent in reversed(size):
        strides.append(at)
        at *= extent
    return strides[::-1]


def is_native(text: bytes) -> bool:
    """Whether a template is one of these. Raises BadConfig when it is nothing this version reads."""
    tree = json.loads(text)
    if tree.get("format") != FORMAT:
        return False
    if tree["engine"] not in ENGINES or tree["kernel"] not in KERNELS:
        raise BadConfig(f"template of {tree['name']} wants {tree['kernel']} of engine {tree['engine']}; this version has neither")
    return True


def key_text(text: bytes, tools: Toolchain, to: Target, made_of: str) -> str:
    """Canonical text of everything the code depends on; its digest is the store key. made_of: ``sources()``."""
    parts = {
        "format": FORMAT, "template": json.loads(text), "sources": made_of, "cpu": to.cpu, "features": to.features,
        "numba": version("numba"), "llvmlite": version("llvmlite"), "compiler": tools.compiler, "machine": tools.machine,
    }  # fmt: skip
    return canonical(parts)


def sources() -> str:
    """A digest of every file the code is made from: the kernels, what lays their scratch out, and what wraps them."""
    from palimpsest.kernels import jit

    found = hashlib.sha256(jit.source_stamp().encode())
    folder = Path(sizes.__file__).parent
    for path in (Path(sizes.__file__), folder / "call.py", folder / "detect.py", folder / "index_select" / "streaming.py",
                 Path(__file__).with_name("native_code.py")):  # fmt: skip
        found.update(path.read_bytes())
    return found.hexdigest()


def note(text: bytes, to: Target) -> str:
    """What the code says about itself, for the loader: engine, arguments, flags. Part of the shared object."""
    tree = json.loads(text)
    return canonical(
        {"abi": 1, "engine": f"native-{tree['engine']}", "args": tree["args"], "cpu_flags": list(to.flags), "name": tree["name"]}
    ).strip()
