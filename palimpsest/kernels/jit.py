"""Compiled CPU kernels: when they are compiled, and where the machine code is kept.

A module that defines kernels is imported only after ``detect`` has said that this machine runs its engine; importing it
compiles its entry
points (seconds the first time, a fraction of a second from the cache), so that no prefill ever waits for a compiler.

The cache is numba's: beside the sources when that folder can be written, else in the user's cache folder (``NUMBA_CACHE_DIR``
overrides both).
An install that can be written nowhere works too; then every process compiles anew. Numba looks only at the file a kernel stands
in, so the
stamp here covers every compiled source file: code from before an edit to a shared piece is never used.
"""

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numba import njit, types
from numba.core import sigutils
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic as _intrinsic
from numba.extending import register_jitable

#: a field of a kernel's NamedTuple, annotated with numba's spelling of its type
Array = np.ndarray
#: an instruction that Python has no word for: a typing function that returns a signature and a code generator
intrinsic: Any = _intrinsic
#: a piece of a kernel: inlined into the kernels that call it, never compiled alone
piece = register_jitable
#: a piece whose products are exact: whether the target fuses its multiplications and additions changes no bit
exact_products = register_jitable(fastmath={"contract"})


def source_stamp() -> str:
    """A digest of every source file that is compiled or takes part in it: this one, ``llvm_ir``, ``sizes``, whose constants are
    compiled in, and those named ``amx*`` and ``avx*``."""
    digest, folder = blake2b(digest_size=16), Path(__file__).parent
    shared = [Path(__file__), folder / "llvm_ir.py", folder / "sizes.py"]
    for path in sorted([*shared, *folder.rglob("amx*.py"), *folder.rglob("avx*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _StampedCache(FunctionCache):
    """Numba's cache of one function, invalidated by a change of any kernel source."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path, filename_base=self._impl.filename_base, source_stamp=source_stamp()
        )


def _type(argument: str | type) -> types.Type:
    """The numba type of ``argument``: a type string, or a NamedTuple class whose fields are annotated with such."""
    if isinstance(argument, str):
        return sigutils.normalize_signature(f"void({argument})")[0][0]
    fields = get_type_hints(argument, include_extras=True).values()
    return types.NamedTuple([_type(one.__metadata__[0]) for one in fields], argument)


def kernel(*arguments: str | type, returns: str = "void") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function of these arguments now, without the interpreter lock, from the cache when it is there.

    An argument is numba's spelling of a type, such as ``f4[:,::1]``, or a NamedTuple class whose fields are ``Annotated[...,
    that spelling]``.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        dispatcher: Any = njit(nogil=True, error_model="numpy")(function)
        with suppress(RuntimeError):  # no folder to keep machine code in: this process keeps its own
            dispatcher._cache = _StampedCache(function)
        result = sigutils.normalize_signature(f"{returns}()")[1]
        dispatcher.compile(result(*[_type(one) for one in arguments]))
        dispatcher.disable_compile()
        return dispatcher

    return compiled
