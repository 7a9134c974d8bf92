"""The latent records of a replay, read past the transport: one file of the run's folder, filled and mapped by every rank.

Each rank writes the pages it owns straight from its persistent cache, at the only moment when no rank can have gone on. Sixteen
private gathers of a million-token history would be sixteen copies of the same bytes.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from palimpsest.core.errors import RankError, Unavailable


@dataclass(frozen=True)
class LatentFile:
    """The records of one replay. ``page`` tokens of ``record`` bytes lie on a page; global page p is page p div ranks of rank
    p mod ranks."""

    path: Path
    page: int
    record: int
    ranks: int

    def write(self, rank: int, pages: NDArray[np.uint8], visible: int) -> None:
        """The pages of ``rank`` that hold any of ``visible`` tokens: pages u8 [own, page * record].

        Raises Unavailable when the disk is full.
        """
        size, digest = self.page * self.record, hashlib.blake2b(digest_size=16)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                for number in range(rank, -(-visible // self.page), self.ranks):
                    raw = np.ascontiguousarray(pages[number // self.ranks]).data
                    digest.update(raw)
                    if os.pwrite(fd, raw, number * size) != size:
                        raise OSError(28, os.strerror(28))
            finally:
                os.close(fd)
            self._digest_of(rank).write_bytes(digest.digest())
        except OSError as error:
            raise Unavailable(
                f"cannot keep the {visible} latent records of a replay ({visible * self.record} bytes) in "
                f"{self.path.parent.name}: {error.strerror}; free some space or name another folder with TMPDIR"
            ) from None

    def read(self, visible: int) -> tuple[NDArray[np.uint8], bytes]:
        """(records u8 [visible, record], a digest of them), once every rank has written. Writing to the array changes no file."""
        if not visible:
            return np.empty((0, self.record), np.uint8), b""
        made = hashlib.blake2b(digest_size=16)
        for rank in range(min(self.ranks, -(-visible // self.page))):
            if not self._digest_of(rank).is_file():
                raise RankError("wrote no latent records for the judges", rank=rank, phase="judge")
            made.update(self._digest_of(rank).read_bytes())
        return np.memmap(self.path, np.uint8, "c", shape=(visible, self.record)), made.digest()

    def remove(self) -> None:
        """Unlink it; who has mapped it keeps the bytes."""
        for path in (self.path, *(self._digest_of(rank) for rank in range(self.ranks))):
            path.unlink(missing_ok=True)

    def _digest_of(self, rank: int) -> Path:
        return self.path.with_suffix(f".{rank}")
