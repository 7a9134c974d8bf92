"""Writes one rank's weights and tables as a safetensors file, straight into its pages: nothing is held twice."""

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from palimpsest.core.errors import Unavailable
from palimpsest.core.spec import Buffer, Program
from palimpsest.core.units import align_up
from palimpsest.kernels.call import TORCH_DTYPES
from palimpsest.ranks.comm import Comm
from palimpsest.run.arena import Arena
from palimpsest.run.weights import Filler

#: safetensors' names of our dtypes
SPELLING = {
    "u8": "U8",
    "bf16": "BF16",
    "fp16": "F16",
    "fp32": "F32",
    "fp64": "F64",
    "i32": "I32",
    "i64": "I64",
    "e4m3": "F8_E4M3",
}
#: alignment of every tensor in the file; safetensors allows no holes, so the padding has names
ALIGN, PAD = 64, "_pad."


def weight_buffers(program: Program) -> tuple[Buffer, ...]:
    """What lies in the file: weights and tables."""
    return tuple(b for b in program.buffers if b.kind in ("weights", "table") and b.nbytes)


@dataclass(frozen=True)
class _Rank:
    rank: int
    size: int


class WeightFile:
    """A safetensors file of ``program``'s weights, mapped for writing; a filler sees it as an arena of weights only."""

    def __init__(self, path: Path, program: Program):
        self.program = program
        header, places, total = _layout(weight_buffers(program))
        self._file = path.open("w+b")
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(1, len(header) + total))
        except OSError as error:
            self._file.close()
            raise Unavailable(
                f"{path}: {error.strerror}; {len(header) + total:,} bytes are needed for these weights, nothing was published, "
                "free space or choose another folder"
            ) from None
        self._map = mmap.mmap(self._file.fileno(), len(header) + total)
        self._map[: len(header)] = header
        raw = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views = {}
        for buffer in weight_buffers(program):
            plane, at = buffer.planes[0], len(header) + places[buffer.name]
            self._views[buffer.name] = raw[at : at + plane.nbytes].view(TORCH_DTYPES[plane.dtype]).view(plane.shape)

    def view(self, buffer: str, plane: str | None = None) -> torch.Tensor:
        return self._views[buffer]

    def close(self) -> None:
        """Flush to the disk and forget the views."""
        self._views.clear()
        self._map.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _layout(buffers: tuple[Buffer, ...]) -> tuple[bytes, Mapping[str, int], int]:
    """Header bytes (padded so that the data begins aligned), byte offsets of the tensors behind it, bytes of the data."""
    entries: dict[str, object] = {}
    places, at = {}, 0
    for number, buffer in enumerate(buffers):
        plane = buffer.planes[0]
        places[buffer.name] = at
        entries[buffer.name] = {
            "dtype": SPELLING[plane.dtype],
            "shape": list(plane.shape),
            "data_offsets": [at, at + plane.nbytes],
        }
        end = align_up(at + plane.nbytes, ALIGN)
        if end > at + plane.nbytes:
            rest = end - at - plane.nbytes
            entries[f"{PAD}{number}"] = {"dtype": "U8", "shape": [rest], "data_offsets": [at + plane.nbytes, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return len(text).to_bytes(8, "little") + text, places, at


def write_weights(path: Path, program: Program, fill: Filler, rank: int) -> None:
    """Fill ``path`` with the weights of ``rank``. Raises Unavailable when the disk is full, and what ``fill`` raises."""
    file = WeightFile(path, program)
    try:
        fill(cast(Arena, file), cast(Comm, _Rank(rank, program.limits.ranks)))
    finally:
        file.close()
