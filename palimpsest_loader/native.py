"""Native code of a core, loaded: programs of torch's ahead-of-time compiler (the one place that touches torch's private loader of
them), and programs behind a plain C function.

What is hashed is what is run: the bytes are read once, checked, copied into a sealed anonymous file, and that file is loaded.
"""

import ctypes
import fcntl
import json
import os
import platform
from collections.abc import Callable
from typing import Any

import torch

from palimpsest_loader.errors import BadCore, CoreError, WrongMachine

Call = Callable[[list[torch.Tensor]], object]

#: symbols of a native program (docs/format.md, "C ABI"), and the version of it
RUN, NOTE, ABI = "palimpsest_run", "palimpsest_note", 1
#: fields of what a native program says about itself
SAID = {"abi", "engine", "name", "args", "cpu_flags"}
#: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): Linux gives a process AMX tiles only when asked
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


def _sealed(data: bytes, name: str) -> int:
    """A descriptor of an anonymous file with these bytes, which nobody can change.

    It stays open for good: the dynamic linker knows a library by its path, and a freed number would be given to the next one.
    """
    fd = os.memfd_create(f"palimpsest-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def load_program(data: bytes, name: str) -> Call:
    """The compiled program in ``data``, a shared object. Running it runs native code: check the digest before. Raises BadCore."""
    from torch._C import _aoti

    fd = _sealed(data, name)
    try:
        runner = _aoti.AOTIModelContainerRunnerCpu(f"/proc/self/fd/{fd}", 1)
    except RuntimeError as error:
        os.close(fd)
        raise BadCore(
            f"{name} is no program that torch {torch.__version__} can load: {str(error).splitlines()[0][:200]}"
        ) from None
    return runner.run


def load_native(data: bytes, name: str, engine: str) -> tuple[Call, dict[str, Any]]:
    """The native program in ``data`` and what it says about itself: ``args``, ``cpu_flags``.

    Raises BadCore when it is no such program or of another engine, WrongMachine when the system refuses what the engine needs.
    """
    fd = _sealed(data, name)
    try:
        library = ctypes.CDLL(f"/proc/self/fd/{fd}", mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        os.close(fd)
        raise BadCore(f"{name} is no native program: {str(error)[:200]}; copy the core again") from None
    try:
        run, note = getattr(library, RUN), ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, NOTE)))
        fact = json.loads(note)
    except (AttributeError, ValueError) as error:
        raise BadCore(f"{name} is no native program: {str(error)[:200]}; copy the core again") from None
    if not isinstance(fact, dict) or (fact.get("abi"), fact.get("engine"), fact.keys()) != (ABI, engine, SAID):
        raise BadCore(f"{name} says {note[:60]!r}; a program of {engine} with ABI {ABI} is wanted: use the loader it is for")
    if engine == "native-amx":
        _request_tiles(name)
    run.argtypes, run.restype = [ctypes.c_void_p], ctypes.c_int32
    places, count = ctypes.c_void_p * len(fact["args"]), len(fact["args"])

    def call(tensors: list[torch.Tensor]) -> None:
        if len(tensors) != count:
            raise CoreError(f"{name} takes {count} arguments; {len(tensors)} are given")
        status = run(places(*[tensor.data_ptr() for tensor in tensors]))
        if status:
            raise CoreError(f"{name} ended with status {status}; its results are not to be used")

    return call, fact


def _request_tiles(name: str) -> None:
    if platform.system() != "Linux" or ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA):
        raise WrongMachine(f"{name} needs AMX tile registers, and this system refuses them; prepare the core again here")
