"""What compiled programs depend on besides their template: torch, the C++ compiler, the instruction set. All of it is in the store key."""

import platform
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from palimpsest.core.errors import Unavailable, UnknownName


@dataclass(frozen=True)
class Isa:
    """An instruction set: the compiler's -march, what torch calls it, and the /proc/cpuinfo flags a machine must have to run it."""

    march: str
    capability: str
    bits: int
    flags: tuple[str, ...]


_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
#: x86-64-v4 and -v3 by the System V psABI; a machine needs every flag of the level, whether a program uses it or not
ISAS = {
    "avx512": Isa("x86-64-v4", "avx512", 512, (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
    "avx2": Isa("x86-64-v3", "avx2", 256, _V3),
}


@dataclass(frozen=True)
class Toolchain:
    """Raises nothing: made by ``find``."""

    torch: str
    compiler: str
    compiler_version: str
    machine: str
    isa: str

    def facts(self) -> dict[str, str]:
        """For the store key."""
        return {"torch": self.torch, "compiler": self.compiler_version, "machine": self.machine, "isa": self.isa}

    def environment(self) -> dict[str, Any]:
        """For the manifest: what a loader checks."""
        return {
            "torch": self.torch, "machine": self.machine, "isa": self.isa, "cpu_flags": list(ISAS[self.isa].flags),
            "compiler": self.compiler_version, "device": "cpu",
        }  # fmt: skip

    def config(self) -> dict[str, Any]:
        """Options of the compiler; part of the key."""
        return {
            "memory_planning": True, "aot_inductor.package_constants_in_so": True, "aot_inductor.enable_line_tables": False,
            "cpp.threads": 1, "cpp.simdlen": ISAS[self.isa].bits, "cpp.march": ISAS[self.isa].march,
            "cpp.enable_floating_point_contract_flag": "off",
        }  # fmt: skip


def find(isa: str | None = None, cpu_flags: frozenset[str] | None = None, compiler: str = "g++") -> Toolchain:
    """The toolchain of this machine for ``isa`` (default: the widest it can run).

    Raises UnknownName for an instruction set nobody knows, Unavailable when the machine lacks it, is not x86-64, or has no compiler.
    """
    import torch

    if platform.machine() != "x86_64":
        raise Unavailable(f"cores are compiled for x86_64; this machine is {platform.machine()}")
    from palimpsest.kernels.detect import cpu_flags as flags_here

    here = cpu_flags if cpu_flags is not None else frozenset(flags_here())
    able = [name for name, level in ISAS.items() if set(level.flags) <= here]
    if isa is not None and isa not in ISAS:
        raise UnknownName("instruction set", isa, list(ISAS))
    if not able or (isa is not None and isa not in able):
        raise Unavailable(f"this processor cannot run {isa or ' or '.join(ISAS)}; it can run {', '.join(able) or 'none of them'}")
    if shutil.which(compiler) is None:
        raise Unavailable(f"no C++ compiler: {compiler} is not on the PATH; install it, prepare needs it (running a core does not)")
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    return Toolchain(torch.__version__, compiler, f"{compiler} {version}", platform.machine(), isa or able[0])
