"""Room for a rank's large private copies: files of the run's own folder instead of memory.

Sixteen ranks that each keep what a million-token replay did would need more memory than the layer itself. A file's pages count
as memory only until the kernel has written them back. Files are unlinked as soon as they are open, so nothing can be left behind.
"""

import ctypes
import gc
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from palimpsest.core.errors import Unavailable

_LIBC = ctypes.CDLL(None)
#: smaller arrays stay in memory
LEAST = 1 << 20


class Spill:
    """Arrays in files of ``folder``."""

    def __init__(self, folder: Path):
        self.folder = folder

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A new array; its bytes are zero where it lies in a file. Raises Unavailable when the disk has no room for it."""
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if nbytes < LEAST:
            return np.empty(shape, kind)
        with tempfile.TemporaryFile(dir=self.folder, prefix="spill-") as file:
            return np.frombuffer(self._mapped(file.fileno(), nbytes), kind).reshape(shape)

    def named(self, path: Path, array: NDArray[Any]) -> NDArray[Any]:
        """A copy in a file that others map too; whoever made it unlinks it. Nothing is made for an empty array."""
        if not array.nbytes:
            return array.copy()
        with path.open("xb+") as file:
            made = np.frombuffer(self._mapped(file.fileno(), array.nbytes), array.dtype).reshape(array.shape)
        np.copyto(made, array)
        return made

    def _mapped(self, fd: int, nbytes: int) -> mmap.mmap:
        try:
            # a hole would fail later, as a fatal signal in the middle of a write
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            raise Unavailable(
                f"no room for {nbytes} bytes of private copies in {self.folder.name}: {error.strerror}; free some space or "
                "name another folder with TMPDIR"
            ) from None
        return mmap.mmap(fd, nbytes)

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """A private copy."""
        made = self.empty(array.shape, array.dtype)
        np.copyto(made, array)
        return made


def give_back() -> None:
    """Free what nobody holds any more, and let the C library give its free pages back to the system (glibc keeps them otherwise:
    200 MB a rank of the full profile)."""
    gc.collect()
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
