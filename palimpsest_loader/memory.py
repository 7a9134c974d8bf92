"""The backing: one anonymous mapping per segment of the plan, and typed views of it."""

import mmap

import torch

from palimpsest_loader.errors import CapacityError
from palimpsest_loader.manifest import ITEM_BYTES

TORCH_DTYPES = {
    "u8": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp32": torch.float32, "fp64": torch.float64, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip


class Segment:
    """``nbytes`` zero bytes; ``raw`` is u8, ``flat`` the whole of it in a dtype. All views share one storage."""

    def __init__(self, kind: str, nbytes: int):
        self.kind, self.nbytes = kind, nbytes
        try:
            self._map = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CapacityError(
                f"segment {kind}: {nbytes:,} bytes wanted, {error.strerror}; free memory or prepare less"
            ) from None
        self.raw = torch.frombuffer(self._map, dtype=torch.uint8)

    def flat(self, dtype: str) -> torch.Tensor:
        """The segment as a vector of ``dtype``, a rest of less than one element left out."""
        return flat(self.raw, dtype)


def flat(raw: torch.Tensor, dtype: str) -> torch.Tensor:
    """u8 bytes as a vector of ``dtype``."""
    item = ITEM_BYTES[dtype]
    return raw[: raw.numel() // item * item].view(TORCH_DTYPES[dtype])
