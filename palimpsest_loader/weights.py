"""Weights of one rank: a safetensors file mapped read-only, so that every process on a host shares one copy."""

import json
import mmap
import warnings
from pathlib import Path
from typing import Any

import torch

from palimpsest_loader.errors import BadCore
from palimpsest_loader.manifest import ITEM_BYTES
from palimpsest_loader.memory import TORCH_DTYPES

#: safetensors' names of our dtypes
SPELLING = {
    "u8": "U8",
    "e4m3": "F8_E4M3",
    "bf16": "BF16",
    "fp16": "F16",
    "fp32": "F32",
    "fp64": "F64",
    "i32": "I32",
    "i64": "I64",
}
#: padding between tensors, so that each begins at a multiple of ``ALIGN`` bytes
PAD, ALIGN = "_pad.", 64
LONGEST_HEADER = 4 << 20


class Weights:
    """Tensors of a mapped file, by name; ``raw`` is the mapping as u8 and must outlive the views."""

    def __init__(self, path: Path, name: str, wanted: dict[str, Any]):
        """``wanted``: tensor -> {"dtype", "shape"} of the manifest. Raises BadCore naming a tensor that is missing or
        different.
        """
        self.name = name
        with path.open("rb") as file:
            nbytes = path.stat().st_size
            if nbytes < 8:
                raise BadCore(f"{name} has {nbytes} bytes; that is no safetensors file; copy the core again")
            self._map = mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # nobody writes: the pages are read-only
            self.raw = torch.frombuffer(self._map, dtype=torch.uint8)
        self.places = self._places(nbytes, wanted)

    def _places(self, nbytes: int, wanted: dict[str, Any]) -> dict[str, int]:
        """Tensor -> byte offset in the file."""
        length = int.from_bytes(self._map[:8], "little")
        if length > min(LONGEST_HEADER, nbytes - 8):
            raise BadCore(f"{self.name}: its header claims {length:,} bytes of {nbytes:,}; copy the core again")
        try:
            header = json.loads(self._map[8 : 8 + length])
        except ValueError as error:
            raise BadCore(f"{self.name}: its header is damaged: {error}; copy the core again") from None
        found, start = {}, 8 + length
        for tensor, want in wanted.items():
            entry = header.get(tensor) if isinstance(header, dict) else None
            if not isinstance(entry, dict):
                raise BadCore(f"{self.name}: weight {tensor} is missing; the manifest lists {len(wanted)}; copy the core again")
            found[tensor] = start + self._place(tensor, entry, want, nbytes - start)
        return found

    def _place(self, tensor: str, entry: dict[str, Any], want: dict[str, Any], room: int) -> int:
        size = ITEM_BYTES[want["dtype"]]
        for extent in want["shape"]:
            size *= extent
        if entry.get("dtype") != SPELLING[want["dtype"]] or entry.get("shape") != want["shape"]:
            held = f"{entry.get('dtype')} {entry.get('shape')}"
            raise BadCore(f"{self.name}: weight {tensor} is {held}; the manifest says {SPELLING[want['dtype']]} {want['shape']}")
        span: Any = entry.get("data_offsets")
        good = isinstance(span, list) and len(span) == 2 and all(type(x) is int for x in span)
        if not good or not 0 <= span[0] <= span[1] <= room or span[1] - span[0] != size:
            raise BadCore(f"{self.name}: weight {tensor} lies at {str(span)[:60]}; {size:,} bytes inside {room:,} are wanted")
        return int(span[0])

    def tensor(self, name: str, dtype: str, shape: list[int]) -> torch.Tensor:
        """A dense view of one tensor."""
        at, count = self.places[name], ITEM_BYTES[dtype]
        for extent in shape:
            count *= extent
        return self.raw[at : at + count].view(TORCH_DTYPES[dtype]).view(shape)
