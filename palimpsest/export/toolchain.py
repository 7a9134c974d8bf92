"""What compiled programs depend on besides their template: torch, the C++ compiler, the instruction set. All of it is in the
store key.
"""

import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsest.core.errors import Unavailable, UnknownName


@dataclass(frozen=True)
class Isa:
    """An instruction set: the compiler's -march, torch's class for it, and the /proc/cpuinfo flags of the level."""

    march: str
    vectors: str
    flags: tuple[str, ...]


_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
#: x86-64-v4 and -v3 by the System V psABI; a machine needs every flag of the level, whether a program uses it or not
ISAS = {
    "avx512": Isa("x86-64-v4", "VecAVX512", (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
    "avx2": Isa("x86-64-v3", "VecAVX2", _V3),
}
#: compiler flags whose spelling differs from /proc/cpuinfo
_SPELLING = {"avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni", "avx512fp16": "avx512_fp16"}


@dataclass(frozen=True)
class Toolchain:
    """Made by ``find``. flags: what a processor needs, by the names of /proc/cpuinfo; here: what this one has; widest: whether
    nobody named an instruction set.
    """

    torch: str
    compiler: str
    machine: str
    isa: str
    flags: tuple[str, ...]
    here: frozenset[str] = frozenset()
    widest: bool = False

    def facts(self) -> dict[str, str]:
        """For the store key."""
        return {
            "torch": self.torch,
            "compiler": self.compiler,
            "machine": self.machine,
            "isa": self.isa,
            "flags": " ".join(self.flags),
        }

    def environment(self, more: Iterable[str] = ()) -> dict[str, Any]:
        """For the manifest: what a loader checks. ``more``: flags that native programs need above the instruction set."""
        return {
            "torch": self.torch,
            "machine": self.machine,
            "isa": self.isa,
            "cpu_flags": sorted({*self.flags, *more}),
            "compiler": self.compiler,
            "device": "cpu",
        }

    def config(self) -> dict[str, Any]:
        """Options of the compiler; part of the key."""
        return {
            "memory_planning": True,
            "aot_inductor.package_constants_in_so": True,
            "aot_inductor.enable_line_tables": False,
            "cpp.threads": 1,
            "cpp.march": ISAS[self.isa].march,
            "cpp.enable_floating_point_contract_flag": "off",
        }


def find(isa: str | None = None, here: frozenset[str] | None = None, compiler: str = "g++") -> Toolchain:
    """The toolchain of this machine for ``isa`` (default: the widest it can run). ``here``: its processor's flags.

    Raises UnknownName for an instruction set nobody knows, Unavailable when the machine lacks it, is not x86-64, or has no
    compiler.
    """
    import torch

    if platform.machine() != "x86_64":
        raise Unavailable(f"cores are compiled for x86_64; this machine is {platform.machine()}")
    here = processor_flags() if here is None else here
    able = [name for name, level in ISAS.items() if set(level.flags) <= here]
    if isa is not None and isa not in ISAS:
        raise UnknownName("instruction set", isa, list(ISAS))
    if not able or (isa is not None and isa not in able):
        raise Unavailable(f"this processor cannot run {isa or ' or '.join(ISAS)}; it can run {', '.join(able) or 'none of them'}")
    if shutil.which(compiler) is None:
        raise Unavailable(
            f"no C++ compiler: {compiler} is not on the PATH; install it, prepare needs it (running a core does not)"
        )
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    chosen = isa or able[0]
    words = [word.removeprefix("-m") for word in vectors(chosen).build_arch_flags().split() if word.startswith("-m")]
    flags = sorted({*ISAS[chosen].flags, *(_SPELLING.get(word, word) for word in words)})
    name = f"{compiler} {version}"
    return Toolchain(torch.__version__, name, platform.machine(), chosen, tuple(flags), here, isa is None)


def vectors(isa: str) -> Any:
    """torch's description of an instruction set."""
    from torch._inductor import cpu_vec_isa

    return getattr(cpu_vec_isa, ISAS[isa].vectors)()


def processor_flags() -> frozenset[str]:
    """Flags of this processor; empty where the system does not say."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    line = next((one for one in path.read_text().splitlines() if one.startswith("flags")), ":")
    return frozenset(line.split(":", 1)[1].split())
