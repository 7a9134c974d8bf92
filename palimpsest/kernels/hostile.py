"""Hostile cases: what every op's ``cases.py`` yields and the draws they share. Used by tests and by anyone who brings an
implementation.

A case holds, per rank, every operand at full prepared capacity. Operands that the op writes start as poison, so bytes an
implementation forgets, or touches without being asked to, show up against the reference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from palimpsest.kernels.call import TORCH_DTYPES, Chunk

#: role -> plane name -> tensor, all of one rank's operands
Planes = dict[str, dict[str, torch.Tensor]]

#: fills floats (NaN in every format) and raw records; and integers, where 0xFF would read as the padding id -1
POISON, INTEGER_POISON = 0xFF, 0x7F


@dataclass(frozen=True)
class Case:
    """One call of one op on ``len(planes)`` ranks.

    bound: None when two correct implementations must agree on every byte; otherwise (planes of a rank before the call) ->
           role -> largest difference allowed to the reference per element (fp64), derived from sizes and unit roundoff
    """

    name: str
    params: Mapping[str, Any]
    chunk: Chunk
    planes: tuple[Planes, ...]
    bound: Callable[[Planes], dict[str, torch.Tensor]] | None = None

    @property
    def ranks(self) -> int:
        return len(self.planes)


class Draw:
    """Seeded tensors. ``integers`` make dot products exact in fp32, so that implementations must agree on bytes."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, shape: tuple[int, ...], dtype: str = "fp32", low: int = -3, high: int = 3) -> torch.Tensor:
        """Whole numbers in [low, high]."""
        return torch.randint(low, high + 1, shape, generator=self.generator).to(TORCH_DTYPES[dtype])

    def normal(self, shape: tuple[int, ...], dtype: str = "fp32", scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(TORCH_DTYPES[dtype])

    def bytes(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=self.generator, dtype=torch.uint8)

    def codes(self, *shape: int) -> torch.Tensor:
        """e4m3 values without NaN, u8."""
        found = self.bytes(*shape)
        found[(found & 0x7F) == 0x7F] = 0x38
        return found

    def table(self, rows: int, pairs: int) -> torch.Tensor:
        """A rotary table [rows, pairs, 2] fp32 of arbitrary angles."""
        angle = torch.randn((rows, pairs), generator=self.generator, dtype=torch.float64) * 100
        return torch.stack([angle.cos(), angle.sin()], 2).to(torch.float32)


def poison(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor every byte of which is poison."""
    count = TORCH_DTYPES[dtype].itemsize
    for size in shape:
        count *= size
    byte = INTEGER_POISON if dtype in ("i32", "i64") else POISON
    return torch.full((count,), byte, dtype=torch.uint8).view(TORCH_DTYPES[dtype]).view(shape)


def one(**roles: torch.Tensor) -> Planes:
    """Planes of one-plane roles."""
    return {role: {role: tensor} for role, tensor in roles.items()}


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff of round to nearest: 2**-24 for fp32, 2**-8 for bf16."""
    return torch.finfo(dtype).eps / 2


def dot_bound(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Largest error of ``left @ right.T`` in fp32 in any order, with the final rounding: ``(depth + 1) u sum |l||r|``, as
    fp64.
    """
    depth = left.shape[-1]
    return (depth + 1) * unit(torch.float32) * (left.double().abs() @ right.double().abs().T)
