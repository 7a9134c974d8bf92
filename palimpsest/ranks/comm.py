"""Comm: the one protocol every transport implements.

Point to point only, into and out of planned views: collectives are loops over ``exchange`` in the ops that need them, so that no
transport allocates behind the plan.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Comm(Protocol):
    """One rank's connection to the others. Every call has a deadline; a rank that misses it is named in a RankError."""

    rank: int
    size: int

    def exchange(
        self,
        sends: Sequence[tuple[int, "torch.Tensor"]],
        receives: Sequence[tuple[int, "torch.Tensor"]],
        label: str,
    ) -> None:
        """Send each (peer, tensor) and receive into each (peer, tensor); returns when all are complete.

        Tensors are contiguous views of planned buffers. Between one pair of ranks messages keep their order. The sizes of a
        pair's messages must agree on both sides. Peers never include this rank.
        """

    def barrier(self, label: str) -> None:
        """Return when every rank has called it with this label."""

    def agree(self, label: str, text: str) -> None:
        """Every rank passes the same text, or RankError names the first rank that differs from rank 0 and both texts."""

    def enter(self, phase: str) -> None:
        """Say which phase this rank is in, for deadlines and error messages. Cheap; never blocks."""


def group_by_peer(rank: int, size: int, messages: Sequence[tuple[int, "torch.Tensor"]]) -> dict[int, list["torch.Tensor"]]:
    """``{peer: tensors in order}``, without the empty ones. Asserts the protocol: contiguous views, other ranks only."""
    grouped: dict[int, list[torch.Tensor]] = {}
    for peer, tensor in messages:
        assert 0 <= peer < size, f"rank {rank} exchanges with rank {peer} of {size}"
        assert peer != rank, f"rank {rank} exchanges with itself"
        assert tensor.is_contiguous(), f"rank {rank} exchanges a view that is not contiguous"
        if tensor.numel():
            grouped.setdefault(peer, []).append(tensor)
    return grouped
