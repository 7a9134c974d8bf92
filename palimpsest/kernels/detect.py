"""Which engines this machine runs, found out before anything is compiled.

A wrong guess is not an error message: given an instruction the target lacks, LLVM ends the process. So an engine is offered
only when the
features numba compiles for (the CPU's, or ``NUMBA_CPU_FEATURES``) contain what it uses and, for AMX, the kernel grants the tile
registers.
"""

import ctypes
import platform
from importlib.util import find_spec

from palimpsest.core.errors import Unavailable, UnknownName

#: what the ``amx`` engine's intrinsics need
AMX_FEATURES = ("amx-tile", "amx-bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi")
#: what the fast kernel of the ``avx`` engine needs; without them the engine runs plain loops
AVX512_FEATURES = ("avx512bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi")
#: what the ``avx512`` engine's attention needs
ATTEND_FEATURES = ("avx512bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq")
#: fastest first: what ``choose_engine(None)`` picks from
PREFERENCE = ("amx", "avx512", "avx", "portable")

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_TILE_DATA = 18


def target_features() -> frozenset[str]:
    """Features of the code numba will emit. Empty without numba."""
    if find_spec("numba") is None:
        return frozenset()
    from llvmlite import binding
    from numba.core import config

    given = getattr(config, "CPU_FEATURES", None)
    if given is not None:
        return frozenset(one[1:] for one in given.split(",") if one.startswith("+"))
    if getattr(config, "CPU_NAME", None) is not None:
        return frozenset()
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


def has_vdpbf16ps() -> bool:
    """Whether numba may emit VDPBF16PS and the AVX512 around it."""
    return target_features().issuperset(AVX512_FEATURES)


def request_tiles() -> str:
    """Ask the kernel for this process's AMX tile registers; "" when granted, else why not. Harmless to repeat."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"AMX is used on Linux x86_64 only; this is {platform.system()} {platform.machine()}"
    refused = ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE_DATA)
    return f"the kernel refuses AMX tile data (errno {ctypes.get_errno()})" if refused else ""


def _missing(name: str) -> str:
    """Why ``name`` cannot run here, or ""."""
    if name == "portable":
        return ""
    if find_spec("numba") is None:
        return "numba is not installed: pip install palimpsest[cpu]"
    if name == "avx":
        return ""
    lacking = sorted(set(AMX_FEATURES if name == "amx" else ATTEND_FEATURES) - target_features())
    if lacking:
        return f"the compile target lacks {', '.join(lacking)}"
    return request_tiles() if name == "amx" else ""


def available_engines() -> dict[str, str]:
    """The engines that run here, fastest first, each with the reason it does."""
    reasons = {
        "amx": "AMX bf16 tiles and AVX512 with VBMI, granted by the kernel",
        "avx512": "numba is installed; the target has AVX512 and VDPBF16PS",
        "avx": f"numba is installed; the target has {_vectors()}",
        "portable": "torch and numpy",
    }
    return {name: reasons[name] for name in PREFERENCE if not _missing(name)}


def _vectors() -> str:
    if has_vdpbf16ps():
        return "AVX512 and VDPBF16PS"
    features = target_features()
    return next((shown for name, shown in (("avx512f", "AVX512"), ("avx2", "AVX2")) if name in features), "baseline vectors")


def choose_engine(name: str | None = None) -> str:
    """The engine to use: ``name`` when it runs here, the fastest that does when None.

    Raises UnknownName for an engine nobody wrote, and Unavailable, naming what this machine has, for one it cannot run.
    """
    if name is None:
        return next(iter(available_engines()))
    if name not in PREFERENCE:
        raise UnknownName("engine", name, list(PREFERENCE))
    if missing := _missing(name):
        here = "; ".join(f"{engine} ({reason})" for engine, reason in available_engines().items())
        raise Unavailable(
            f"engine {name} does not run here: {missing}. This machine has {here}; choose one of those or leave --engine out"
        )
    return name
