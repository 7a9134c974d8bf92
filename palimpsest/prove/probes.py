"""Gate O4: inputs for which the attention output follows bit for bit from the ids alone.

Every token's latent record holds the values +1 and -1, drawn from its id. P0: the query is zero, so every probability is
exactly 1 and a coordinate is (sum of signs) / n. P1: the query is a power of two on one coordinate, so that the logits of one
class of ids lie at least 2**10 below the others', their probabilities are exactly 0, and a coordinate is the mean over the
other class; the class is the id's parity (P1), or whether the id lies before the alias end (P2). Sums are integers below 2**24
and so exact in any order, block or format; the one division is rounded once, or is a product with the rounded reciprocal: at
most two candidates. A coordinate is a fingerprint of all records that were really read.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from palimpsest.kernels.call import TORCH_DTYPES
from palimpsest.prove.data import BLOCK, MINUS_ONE, ONE, generator, to_bf16
from palimpsest.prove.oracle import LatentFormat

U8 = NDArray[np.uint8]
#: kinds of probe rows, in turn
KINDS = ("P0", "P1", "P2")


@dataclass(frozen=True)
class Probe:
    """seed: of the signs; layout: of a latent record; alias_end: first id past the index history's bytes; softmax_scale: of the
    layer."""

    seed: int
    layout: LatentFormat
    alias_end: int
    softmax_scale: float

    @property
    def usable(self) -> bool:
        """Signs times the record's scale stay exact when the scale is a power of two."""
        return 2 * math.frexp(self.layout.scale)[0] == 1

    def signs(self, ids: NDArray[np.int64]) -> NDArray[np.int8]:
        """[n, kv_lora] of +1 and -1."""
        lora = self.layout.kv_lora
        found = np.empty((len(ids), lora), np.int8)
        for block in np.unique(ids // BLOCK):
            at = np.flatnonzero(ids // BLOCK == block)
            drawn = generator(self.seed, "probe", int(block)).integers(0, 256, (BLOCK, -(-lora // 8)), np.uint8)
            bits = np.unpackbits(drawn[ids[at] % BLOCK], axis=1)[:, :lora]
            found[at] = 1 - 2 * bits.astype(np.int8)
        found[:, 0] = 1 - 2 * (ids % 2)
        if lora > 1:
            found[:, 1] = np.where(ids < self.alias_end, 1, -1)
        return found

    def records(self, start: int, stop: int) -> U8:
        """Latent records of tokens [start, stop): signs as values, zeros as the other key dims."""
        signs = self.signs(np.arange(start, stop, dtype=np.int64))
        n, f = len(signs), self.layout
        if f.name in ("fp8", "fp8_ds_mla"):
            codes = np.where(signs > 0, ONE, MINUS_ONE).astype(np.uint8)
            rest = np.zeros((n, f.record_bytes - f.kv_lora), np.uint8)
            if f.name == "fp8_ds_mla":
                groups = f.kv_lora // 128
                rest[:, : 4 * groups] = np.ones((n, groups), "<f4").view(np.uint8)
            return np.concatenate([codes, rest], axis=1)
        values = np.zeros((n, f.dim), np.float32)
        values[:, : f.kv_lora] = signs
        return to_bf16(values).astype("<u2").view(np.uint8) if f.name == "bf16" else values.astype("<f4").view(np.uint8)

    def query(self, rows: int, heads: int, activation: str) -> torch.Tensor:
        """[rows, heads, dim]: row r is of kind ``KINDS[r % 3]``."""
        made = torch.zeros((rows, heads, self.layout.dim), dtype=TORCH_DTYPES[activation])
        for kind, coordinate in ((1, 0), (2, min(1, self.layout.kv_lora - 1))):
            made[kind :: len(KINDS), :, coordinate] = float(self._strength())
        return made

    def _strength(self) -> int:
        """A power of two that puts the two classes' logits at least 2**10 apart."""
        return 1 << (10 + max(0, -math.frexp(self.softmax_scale * self._unit())[1] + 1))

    def _unit(self) -> float:
        """What a sign is worth: fp8_ds_mla and the wide formats hold it as it is."""
        return self.layout.scale if self.layout.name == "fp8" else 1

    def candidates(self, row: int, ids: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The two fp32 results [kv_lora] that a row over these ids can give: sum / n, and sum * (1 / n)."""
        signs = self.signs(ids)
        kind = row % len(KINDS)
        if kind:
            chosen = signs[:, min(kind - 1, self.layout.kv_lora - 1)] > 0
            signs = signs[chosen] if chosen.any() else signs
        n = np.float32(len(signs))
        total = signs.sum(axis=0, dtype=np.int64).astype(np.float32) * np.float32(self._unit())
        return total / n, total * (np.float32(1) / n)

    def faults(self, row: int, ids: NDArray[np.int64], context: NDArray[np.float32]) -> int:
        """How many coordinates of ``context`` [heads, kv_lora] are neither candidate, as bytes with -0 made +0."""
        first, second = (c.view(np.uint32) for c in (x + np.float32(0) for x in self.candidates(row, ids)))
        found = (context + np.float32(0)).view(np.uint32)
        return int(np.count_nonzero((found != first) & (found != second)))
