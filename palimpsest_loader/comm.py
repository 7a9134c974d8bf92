"""Ranks: the protocol that a multi-rank core needs, alone or over torch.distributed point to point.

Any object with these four methods serves; the transports of ``palimpsest.ranks`` do.
"""

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from palimpsest_loader.errors import CommError

Message = tuple[int, torch.Tensor]


class Comm(Protocol):
    """One rank's connection to the others."""

    rank: int
    size: int

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], label: str) -> None:
        """Send and receive contiguous views; returns when all are complete. Between two ranks messages keep their order."""

    def barrier(self, label: str) -> None:
        """Return when every rank has called it."""

    def agree(self, label: str, text: str) -> None:
        """Raise on every rank unless all pass the same text."""

    def enter(self, phase: str) -> None:
        """Say which phase this rank is in."""


class Alone:
    """The only rank."""

    rank, size = 0, 1

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], label: str) -> None:
        assert not sends, label
        assert not receives, label

    def barrier(self, label: str) -> None:
        pass

    def agree(self, label: str, text: str) -> None:
        pass

    def enter(self, phase: str) -> None:
        pass


class Distributed:
    """Ranks of an initialised torch.distributed group (gloo). Each wait has the deadline ``deadline_s``. Raises CommError."""

    def __init__(self, *, deadline_s: float = 60.0):
        import torch.distributed as dist

        self._dist: Any = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._deadline, self._phase = timedelta(seconds=deadline_s), "start"
        self._mine, self._theirs = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], label: str) -> None:
        dist = self._dist
        works = []
        try:
            for peer, tensor in receives:
                if tensor.numel():
                    works.append((peer, dist.irecv(_bytes(tensor), peer)))
            for peer, tensor in sends:
                if tensor.numel():
                    works.append((peer, dist.isend(_bytes(tensor), peer)))
            for peer, work in works:
                if not work.wait(self._deadline):
                    raise CommError(f"rank {self.rank} in {self._phase}: {label}: rank {peer} did not answer in {self._deadline}")
        except RuntimeError as error:
            if isinstance(error, CommError):
                raise
            raise CommError(f"rank {self.rank} in {self._phase}: {label}: {str(error).splitlines()[0][:200]}") from None

    def barrier(self, label: str) -> None:
        step = 1
        while step < self.size:
            there, here = (self.rank + step) % self.size, (self.rank - step) % self.size
            self.exchange([(there, self._mine)], [(here, self._theirs)], f"barrier {label}")
            step *= 2

    def agree(self, label: str, text: str) -> None:
        self._mine.copy_(torch.frombuffer(bytearray(hashlib.sha512(text.encode()).digest()), dtype=torch.uint8))
        mine = self._mine.tolist()
        for distance in range(1, self.size):
            there, here = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self.exchange([(there, self._mine)], [(here, self._theirs)], f"agree {label}")
            if self._theirs.tolist() != mine:
                raise CommError(
                    f"rank {self.rank} in {self._phase}: {label}: rank {here} has another value; here it is {text[:200]!r}"
                )

    def enter(self, phase: str) -> None:
        self._phase = phase


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """gloo knows fewer dtypes than the plan: messages travel as u8."""
    return tensor.view(-1).view(torch.uint8)
