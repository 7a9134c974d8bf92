"""What an implementation of an op receives: views of the declared buffers, parameters, scratch, and the active sizes.

An implementation is ``run(call, chunk)``. It reads and writes views, uses ``call.scratch``, and allocates no tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from palimpsest.core.units import align_up
from palimpsest.ranks.comm import Comm

TORCH_DTYPES = {
    "u8": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp32": torch.float32, "fp64": torch.float64, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True)
class Chunk:
    """The active sizes of one prefill call.

    history: tokens already in the caches
    rows:    active query rows; row i is token ``history + i``
    hidden:  the caller's normed hidden rows, [rows, hidden]; only ``bind_inputs`` reads it
    """

    history: int
    rows: int
    hidden: torch.Tensor | None = None

    @property
    def visible(self) -> int:
        """Tokens in the caches once this chunk is appended: row i sees ``history + i + 1`` of them."""
        return self.history + self.rows


class Scratch:
    """Carves typed tensors out of one planned byte range. ``reset`` at the start of every call."""

    def __init__(self, raw: torch.Tensor):
        self.raw = raw
        self.used = 0

    def reset(self) -> None:
        self.used = 0

    def take(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A dense view of ``shape``, 64-byte aligned, uninitialised. An overrun is our bug: the contract's scratch is too
        small.
        """
        start, kind = align_up(self.used, 64), TORCH_DTYPES[dtype]
        size = kind.itemsize
        for extent in shape:
            size *= extent
        assert start + size <= self.raw.numel(), f"scratch overrun: {start} + {size} bytes of {self.raw.numel()}"
        self.used = start + size
        return self.raw[start : start + size].view(kind).view(shape)


def no_tap(event: str, **data: Any) -> None:
    """The tap of a run nobody watches."""


@dataclass
class Call:
    """One step bound to its buffers at full prepared capacity; made once at ``prepare``.

    views:  role -> plane name -> tensor of the whole buffer plane (a one-plane buffer's plane is named like the buffer)
    raws:   role -> the buffer as flat u8
    params: the step's parameters
    tap:    called by implementations at named events with read-only data; the qualifier watches through it
    """

    name: str
    params: Mapping[str, Any]
    views: Mapping[str, Mapping[str, torch.Tensor]]
    raws: Mapping[str, torch.Tensor]
    scratch: Scratch
    comm: Comm
    tap: Callable[..., None] = field(default=no_tap)

    def view(self, role: str, plane: str | None = None) -> torch.Tensor:
        """The named plane of a role, or its only plane."""
        planes = self.views[role]
        if plane is None:
            (only,) = planes.values()
            return only
        return planes[plane]

    @property
    def watched(self) -> bool:
        """Whether somebody listens to the taps."""
        return self.tap is not no_tap

    def has(self, role: str) -> bool:
        """Whether an optional role was given."""
        return role in self.views


Implementation = Callable[[Call, Chunk], None]
