"""Rotary embedding from a table of cos and sin.

A rotated element is ``fp32(fp64(a * cos) -+ fp64(b * sin))``: both products are exact in fp64, so the value does not depend on
whether a machine fuses them. Elements keep their places: pairs are (i, i + n/2) for ``half`` and (2i, 2i + 1) for
``interleaved``."""

import torch

from palimpsest.core.errors import UnknownName
from palimpsest.kernels.call import Scratch
from palimpsest.kernels.sizes import ROW_TILE


def pairs(rows: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and second element of every pair of ``rows`` [m, dims]: each [m, dims/2]. Raises UnknownName."""
    if layout == "half":
        half = rows.shape[1] // 2
        return rows[:, :half], rows[:, half:]
    if layout == "interleaved":
        return rows[:, 0::2], rows[:, 1::2]
    raise UnknownName("RoPE layout", layout, ["half", "interleaved", "none"])


class Rotation:
    """Rotates tiles of at most ``ROW_TILE`` rows in place (``sizes.rotation_scratch``); does nothing for the layout ``none``."""

    def __init__(self, scratch: Scratch, dims: int, layout: str):
        self.layout, self.half = layout, dims // 2
        self.active = layout != "none" and dims > 0
        self.tiles = [scratch.take((ROW_TILE, dims // 2), "fp64") for _ in range(5)] if self.active else []

    def __call__(self, rows: torch.Tensor, table: torch.Tensor | None) -> None:
        """``rows`` [m, dims] fp32 in place, by ``table`` [m, >= dims/2, 2] fp32 (cos, sin)."""
        if not self.active:
            return
        assert table is not None, f"layout {self.layout} needs the rope table"
        m = rows.shape[0]
        first, second = pairs(rows, self.layout)
        a, b, cos, sin, out = (tile[:m] for tile in self.tiles)
        a.copy_(first)
        b.copy_(second)
        cos.copy_(table[:, : self.half, 0])
        sin.copy_(table[:, : self.half, 1])
        torch.mul(a, cos, out=out)
        cos.mul_(b)
        out.sub_(b.mul_(sin))
        first.copy_(out)
        second.copy_(cos.add_(sin.mul_(a)))
