"""e4m3 in and out: quantisation with one scale per block of a row, and decoding through a 256-entry table.

e4m3 is OCP FP8 E4M3 "fn": no infinities, NaN is 0x7f and 0xff, the largest value is 448. Scales are fp32; ``ue8m0`` ones are
powers of two. A block that holds an infinity or a NaN gets the scale inf and its bad elements become NaN codes, so the damage
stays visible downstream. Everything is carved from scratch."""

import numpy as np
import torch

from palimpsest.kernels.call import TORCH_DTYPES, Scratch
from palimpsest.kernels.sizes import ROW_TILE

#: the largest e4m3 value, and the floor of a block's largest magnitude
LARGEST = 448.0
FLOOR = 1e-4

_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF


def round_up_to_power_of_two(scale: np.ndarray, bits: np.ndarray) -> None:
    """In place: the smallest power of two not below each positive normal fp32 of ``scale``; inf stays inf.

    ``bits`` is int32 scratch of the same shape. Works on the exponent field: a logarithm would miss exact powers of two.
    """
    np.copyto(bits, scale.view(np.int32))
    np.minimum(bits, _EXPONENT, out=bits)
    np.add(bits, _MANTISSA, out=bits)
    np.bitwise_and(bits, _EXPONENT, out=bits)
    np.copyto(scale, bits.view(np.float32))


def clamp(tile: torch.Tensor) -> None:
    """Clamp fp32 ``tile`` to the e4m3 range in place; NaN stays. (numpy, because a torch scalar operand is a tensor of its
    own.)
    """
    values = tile.numpy()
    np.minimum(values, np.float32(LARGEST), out=values)
    np.maximum(values, np.float32(-LARGEST), out=values)


class Quantiser:
    """Quantises tiles ``[ROW_TILE, width]`` with one scale per ``block`` consecutive elements (``sizes.quantise_scratch``).

    scale = max(amax, FLOOR) / LARGEST in fp32, rounded up to a power of two when ``power_of_two``
    code  = e4m3(clamp(x / scale, -LARGEST, LARGEST)), one fp32 division, round to nearest even
    """

    def __init__(self, scratch: Scratch, width: int, block: int, *, power_of_two: bool):
        blocks = width // block
        self.power_of_two = power_of_two
        self.magnitude = scratch.take((ROW_TILE, blocks, block), "fp32")
        self.codes = scratch.take((ROW_TILE, width), "e4m3")
        self.scales = scratch.take((ROW_TILE, blocks), "fp32")
        self._bits = scratch.take((ROW_TILE, blocks), "i32").numpy()
        self._scales = self.scales.numpy()

    def __call__(self, tile: torch.Tensor) -> None:
        """Fill ``codes`` [ROW_TILE, width] e4m3 and ``scales`` [ROW_TILE, blocks] fp32 from ``tile`` [ROW_TILE, width] fp32."""
        spread = self.magnitude
        spread.copy_(tile.view(spread.shape))
        torch.amax(spread.abs_(), 2, out=self.scales)
        np.copyto(self._bits, self._scales.view(np.int32))
        np.minimum(self._bits, _EXPONENT, out=self._bits)
        np.maximum(self._bits.view(np.float32), np.float32(FLOOR), out=self._scales)
        np.divide(self._scales, np.float32(LARGEST), out=self._scales)
        if self.power_of_two:
            round_up_to_power_of_two(self._scales, self._bits)
        spread.copy_(tile.view(spread.shape))
        spread.div_(self.scales.unsqueeze(2))
        clamp(spread)
        self.codes.copy_(spread.view(self.codes.shape))


class Decoder:
    """Decodes e4m3 codes exactly, optionally times a constant rounded once (``sizes.decode_scratch``)."""

    def __init__(self, scratch: Scratch, elements: int, dtype: str, scale: float = 1.0):
        """``elements``: the most codes of one call; ``dtype``: fp32 or fp64; the table holds ``dtype(code * scale)``."""
        codes = scratch.take((256,), "u8")
        exact = scratch.take((256,), "fp64")
        torch.arange(256, out=codes)
        exact.copy_(codes.view(TORCH_DTYPES["e4m3"]))
        np.multiply(exact.numpy(), scale, out=exact.numpy())
        self.table = exact
        if dtype == "fp32":
            self.table = scratch.take((256,), "fp32")
            self.table.copy_(exact)
        self.index = scratch.take((elements,), "i32")

    def __call__(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` (dense, the table's dtype) = the values of ``codes`` (u8 of the same shape, any strides)."""
        index = self.index[: codes.numel()]
        index.view(codes.shape).copy_(codes)
        torch.index_select(self.table, 0, index, out=out.view(-1))
