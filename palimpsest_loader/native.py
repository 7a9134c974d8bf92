"""The one place that touches torch's private loader of ahead-of-time compiled programs.

What is hashed is what is run: the bytes are read once, checked, copied into a sealed anonymous file, and that file is loaded.
"""

import fcntl
import os
from collections.abc import Callable

import torch

from palimpsest_loader.errors import BadCore

Call = Callable[[list[torch.Tensor]], object]


def load_program(data: bytes, name: str) -> Call:
    """The compiled program in ``data``, a shared object. Running it runs native code: check the digest before. Raises BadCore."""
    from torch._C import _aoti

    fd = os.memfd_create(f"palimpsest-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        runner = _aoti.AOTIModelContainerRunnerCpu(f"/proc/self/fd/{fd}", 1)
    except RuntimeError as error:
        os.close(fd)
        raise BadCore(
            f"{name} is no program that torch {torch.__version__} can load: {str(error).splitlines()[0][:200]}"
        ) from None
    # the file stays open: the dynamic linker knows a library by its path, and a freed number would be given to the next one
    return runner.run
