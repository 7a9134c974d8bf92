"""What a record says about where it was made: source, machine, libraries, environment. Facts only; no verdict is formed here.

Paths are relative, the environment is an allow-list plus one digest of all of it, and no value of an unlisted variable is ever
written.
"""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import palimpsest
from palimpsest.core.canon import digest
from palimpsest.plan.plan import Plan
from palimpsest.prove.evidence import file_digest

#: variables that change arithmetic or threading; the only ones whose values are recorded
ENVIRONMENT = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA",
    "GLOO_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "LANG",
)  # fmt: skip
#: distributions whose version and file digest are recorded
LIBRARIES = ("torch", "numpy", "rich", "palimpsest")
#: modules that judge: their digests are named one by one
JUDGES = (
    "gates",
    "oracle",
    "ties",
    "exact",
    "bounds",
    "cases",
    "data",
    "lint",
    "verify",
    "events",
    "shadow",
    "phase_lock",
    "enclosure",
    "probes",
    "roundtrip",
    "capacity",
    "liveness",
    "licence",
)
#: parts of a checkout that are the program; anything else may be edited freely
_PROGRAM = ("palimpsest", "pyproject.toml")
_GIT_SECONDS = 20

CLAIM = (
    "The planned reuse of memory in layer {layer} of {name} is exact: with the index history on the head of the latent history "
    "and with separate histories, {ranks} ranks computed the same bytes from the same persistent caches in eleven cases, "
    "selected sets are valid for exact scores, and outputs are those of the recorded tail."
)
NON_CLAIMS = (
    "not: response quality of the model",
    "not: speed",
    "not: other layers, other checkpoints, other shapes, other engines or other devices",
    "not: the gates listed as absent from this version",
)


def package_root() -> Path:
    """The folder of the running ``palimpsest`` package."""
    return Path(palimpsest.__file__).resolve().parent


def package_digest(root: Path) -> str:
    """sha256 over the names and digests of every source file of the package."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.suffix in (".py", ".json", ".typed"))
    return digest([[str(p.relative_to(root)), file_digest(p)] for p in files])


def source_facts() -> dict[str, Any]:
    """Commit, tree and dirty flag of a checkout; of an installed package only its digest, never dirty."""
    root = package_root()
    facts: dict[str, Any] = {
        "kind": "package", "commit": None, "tree": None, "dirty": False, "package_digest": package_digest(root),
        "modules": {p.stem: file_digest(p) for p in (root / "prove" / f"{name}.py" for name in JUDGES) if p.is_file()},
    }  # fmt: skip
    top = _git(root, "rev-parse", "--show-toplevel")
    if (
        top is None
        or Path(top).resolve() != root.parent
        or _git(root.parent, "ls-files", "palimpsest/prove/gates.py") in (None, "")
    ):
        return facts
    changed = _git(root.parent, "status", "--porcelain", "--", *_PROGRAM)
    commit, tree = _git(root.parent, "rev-parse", "HEAD"), _git(root.parent, "rev-parse", "HEAD^{tree}")
    return facts | {"kind": "git", "commit": commit, "tree": tree, "dirty": changed != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    """stdout of a git command, or None when git or the checkout is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment_facts(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """(allow-listed variables with their values, sha256 of the whole environment)."""
    whole = hashlib.sha256(
        "\0".join(f"{k}={v}" for k, v in sorted(environment.items())).encode(errors="surrogateescape")
    ).hexdigest()
    return {name: environment[name] for name in ENVIRONMENT if name in environment}, whole


def installed_facts() -> dict[str, dict[str, str | None]]:
    """name -> version and the digest of the distribution's own file list (which holds every file's digest)."""
    facts: dict[str, dict[str, str | None]] = {"python": {"version": platform.python_version(), "sha256": None}}
    for name in LIBRARIES:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        listing = found.read_text("RECORD")
        facts[name] = {"version": found.version, "sha256": hashlib.sha256(listing.encode()).hexdigest() if listing else None}
    return facts


def machine_facts() -> dict[str, Any]:
    """CPU model and flags that matter, cores, memory, kernel, page size and huge-page mode."""
    cpu = _fields(Path("/proc/cpuinfo"))
    memory = _fields(Path("/proc/meminfo"))
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpu": cpu.get("model name", platform.processor()),
        "cpu_flags": " ".join(sorted(f for f in flags if f.startswith(("avx", "amx", "fma", "sse4", "asimd", "sve")))),
        "cores": os.cpu_count() or 0,
        "memory_kib": int(memory.get("MemTotal", "0").split()[0]),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "huge_pages": huge.read_text().strip() if huge.is_file() else "",
        "byte_order": sys.byteorder,
        "libc": " ".join(platform.libc_ver()),
    }


def _fields(path: Path) -> dict[str, str]:
    """``name: value`` lines of a proc file, the first of each name."""
    found: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                found.setdefault(name.strip(), value.strip())
    return found


def arrangement_facts(plan: Plan, step_names: list[str]) -> dict[str, Any]:
    """The layout table of one arrangement: every view, the segments, and the pairs that share bytes.

    Steps are numbered from 1 in program order; 0 is before the first and n + 1 after the last.
    """
    number = {"start": 0, "end": len(step_names) + 1} | {name: i for i, name in enumerate(step_names, 1)}
    return {
        "digest": plan.digest,
        "logical": plan.total,
        "segments": {segment.kind: segment.nbytes for segment in plan.segments},
        "views": {
            p.buffer: {
                "segment": p.kind,
                "offset": p.offset,
                "bytes": p.nbytes,
                "align": p.align,
                "steps": [number[p.first], number[p.last]],
            }
            for p in plan.places
        },
        "shared": [sorted((o.early, o.late)) for o in plan.overlaps],
    }


def relative_folder(folder: Path) -> str:
    """``folder`` relative to the working directory when it lies inside it, else only its last name."""
    here = Path.cwd().resolve()
    resolved = folder.resolve()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else resolved.name
