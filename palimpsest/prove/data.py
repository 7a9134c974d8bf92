"""Seeded inputs of a case: history records in cache layout, hidden rows, injected index queries. Any token range, any order, the
same bytes.

Every block of 1024 tokens (or rows) has a generator of its own, seeded by sha256 of (master seed, name of the data, what, block),
so that a million-token history is made shard by shard and made again to verify it without ever being whole. Two regimes of index
records:

natural: gaussian e4m3 codes without NaN, plausible scales
lattice: q, k in {-1, 0, 1}, scale 1, w in {-2, -1, 1, 2}: scores are small integers, exact in every arithmetic, and ties are
plentiful

A lattice key has three regions of dims. ``beacon`` (dim/4) is 1 for planted records only, ``tie`` (3 dim/16) is 1 for the planted
tie class only, and the rest holds fewer nonzeros than ``tie`` has dims, for ordinary records only. A lattice query meets
``beacon`` and (in tie rows) ``tie`` with the sign of its head's weight. So with W = sum of positive weights a planted record
scores beacon * W, a tie record tie * W and an ordinary one less: by counting, not by luck.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from palimpsest.core.errors import CapacityError
from palimpsest.core.geometry import Formats, Geometry, latent_record_bytes
from palimpsest.prove.cases import Case, Replay, zero_row
from palimpsest.prove.exact import E4M3_VALUES

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

#: tokens or rows of one generator
BLOCK = 1024
#: standard deviation of values quantised so that their largest comes near 448
SPREAD = 120.0
#: e4m3 codes of 1 and -1
ONE, MINUS_ONE = 0x38, 0xB8


def generator(master: int, *names: object) -> np.random.Generator:
    """A generator for a name, independent of every other name's: PCG64 seeded by sha256 of the parts."""
    text = "/".join(str(n) for n in (master, *names)).encode()
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(text).digest(), "little")))


def encode_e4m3(values: NDArray[np.float64]) -> U8:
    """Nearest e4m3 codes (ties to the even code), saturating at 448; for tables, not for speed."""
    magnitude = E4M3_VALUES[:0x7F]
    middle = (magnitude[1:] + magnitude[:-1]) / 2
    size = np.abs(values)
    low, high = np.searchsorted(middle, size, "left"), np.searchsorted(middle, size, "right")
    code = np.where(low % 2 == 0, low, high)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


@lru_cache(maxsize=8)
def _gaussian_codes(deviation: float) -> U8:
    """e4m3 codes at the 65536 equal shares of a normal distribution: a uniform 16-bit number indexes a gaussian code."""
    shares = [NormalDist(0, deviation).inv_cdf((i + 0.5) / 65536) for i in range(65536)]
    table = encode_e4m3(np.array(shares))
    table.setflags(write=False)
    return table


def _codes(rng: np.random.Generator, deviation: float, *shape: int) -> U8:
    """Gaussian e4m3 codes of this deviation, saturated at 448, none of them NaN."""
    return _gaussian_codes(deviation)[rng.integers(0, 65536, shape, np.uint16)]


def to_bf16(values: F32) -> NDArray[np.uint16]:
    """bf16 bits of finite fp32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Regions:
    """Dims of a lattice key: [0, beacon) planted, [beacon, beacon + tie) tie class, the rest ordinary with at most ``ordinary``
    nonzeros."""

    dim: int
    beacon: int
    tie: int
    ordinary: int

    @staticmethod
    def of(dim: int) -> "Regions":
        """Raises CapacityError for fewer than 16 dims, where the three levels collapse."""
        if dim < 16:
            raise CapacityError(f"index dim {dim} is too small for planted lattice data; it needs 16 or more")
        return Regions(dim, dim // 4, 3 * dim // 16, 3 * dim // 16 - 1)


@dataclass(frozen=True)
class Data:
    """All inputs of one case.

    Shapes: index values [n, dim] u8 e4m3 (fp8) or [n, 4 dim] u8 (fp32), scales [n] fp32 or None; latent [n, record] u8; hidden
    [n, hidden] fp32; queries [n, heads, dim] u8 e4m3 or [n, heads, 4 dim] u8, weights [n, heads] fp32. Multi-byte numbers are
    little-endian.
    """

    master: int
    geometry: Geometry
    formats: Formats
    case: Case

    # -- histories ---------------------------------------------------------------------------------------------------------------

    def index_records(self, start: int, stop: int) -> tuple[U8, F32 | None]:
        """Index records of tokens [start, stop)."""
        parts = [self._index_block(*part) for part in _blocks(start, stop)] or [self._index_block(0, 0, 0)]
        scales = [s for _, s in parts if s is not None]
        return np.concatenate([v for v, _ in parts]), np.concatenate(scales) if scales else None

    def latent_records(self, start: int, stop: int) -> U8:
        """Latent records of tokens [start, stop); natural in every case, and the same in all cases."""
        record = latent_record_bytes(self.geometry, self.formats)
        parts = [self._latent_block(b)[lo:hi] for b, lo, hi in _blocks(start, stop)]
        return np.concatenate(parts) if parts else np.zeros((0, record), np.uint8)

    def read_index(self, ids: NDArray[np.int64]) -> tuple[U8, F32 | None]:
        """Index records of any ids, in their order."""
        values, scales = self.index_records(0, 0)
        out, sigma = np.zeros((len(ids), values.shape[1]), np.uint8), np.zeros(len(ids), np.float32)
        for block, at in _owners(ids):
            made, scale = self._index_block(block, 0, BLOCK)
            out[at] = made[ids[at] % BLOCK]
            if scale is not None:
                sigma[at] = scale[ids[at] % BLOCK]
        return out, None if scales is None else sigma

    def read_latent(self, ids: NDArray[np.int64]) -> U8:
        """Latent records of any ids, in their order."""
        out = np.zeros((len(ids), latent_record_bytes(self.geometry, self.formats)), np.uint8)
        for block, at in _owners(ids):
            out[at] = self._latent_block(block)[ids[at] % BLOCK]
        return out

    def _index_block(self, block: int, low: int, high: int) -> tuple[U8, F32 | None]:
        rng = generator(self.master, self.case.data, "index", block)
        dim, fp8 = self.geometry.indexer.dim, self.formats.index == "fp8"
        if self.case.records == "lattice":
            keys = self._lattice_keys(rng, block)[low:high]
            return self._stored(keys), np.ones(high - low, np.float32) if fp8 else None
        if not fp8:
            return rng.standard_normal((BLOCK, dim), np.float32)[low:high].view(np.uint8), None
        codes = _codes(rng, SPREAD, BLOCK, dim)
        if self.geometry.indexer.scale_format == "ue8m0":
            scales = np.ldexp(np.float32(1), rng.integers(-9, -5, BLOCK)).astype(np.float32)
        else:
            scales = (rng.uniform(2.0, 5.0, BLOCK) / 448).astype(np.float32)
        return codes[low:high], scales[low:high]

    def _stored(self, lattice: NDArray[np.int8]) -> U8:
        """{-1, 0, 1} as index bytes."""
        if self.formats.index == "fp8":
            return np.array([MINUS_ONE, 0, ONE], np.uint8)[lattice + 1]
        return lattice.astype("<f4").view(np.uint8)

    def _lattice_keys(self, rng: np.random.Generator, block: int) -> NDArray[np.int8]:
        regions = Regions.of(self.geometry.indexer.dim)
        first = regions.beacon + regions.tie
        keys = np.zeros((BLOCK, regions.dim), np.int8)
        ordinary = _sparse(rng, BLOCK, regions.dim - first, regions.ordinary)
        ids = block * BLOCK + np.arange(BLOCK)
        tie = ids % self.case.tie_stride == self.case.tie_stride - 1 if self.case.tie_stride else np.zeros(BLOCK, bool)
        planted = np.isin(ids, self.case.planted)
        tie &= ~planted
        keys[:, first:] = ordinary
        keys[tie | planted, first:] = 0
        keys[tie, regions.beacon : first] = 1
        keys[planted, : regions.beacon] = 1
        return keys

    def _latent_block(self, block: int) -> U8:
        rng = generator(self.master, "latent", self.formats.latent, block)
        g, kind = self.geometry, self.formats.latent
        if kind == "fp8":
            return _codes(rng, 1 / g.latent_scale, BLOCK, g.latent_dim)
        if kind == "fp8_ds_mla":
            codes = _codes(rng, SPREAD, BLOCK, g.kv_lora)
            scales = (rng.uniform(2.0, 5.0, (BLOCK, g.kv_lora // 128)) / 448).astype("<f4").view(np.uint8)
            rope = to_bf16(rng.standard_normal((BLOCK, g.rope.dims), np.float32)).astype("<u2").view(np.uint8)
            return np.concatenate([codes, scales, rope.reshape(BLOCK, 2 * g.rope.dims)], axis=1)
        values = rng.standard_normal((BLOCK, g.latent_dim), np.float32)
        return to_bf16(values).astype("<u2").view(np.uint8) if kind == "bf16" else values.astype("<f4").view(np.uint8)

    # -- rows --------------------------------------------------------------------------------------------------------------------

    def hidden(self, step: Replay, start: int, stop: int) -> F32:
        """Normed hidden rows [start, stop) of a replay, standard normal fp32; equal ``inputs`` names give equal rows."""
        width = self.geometry.hidden
        parts = []
        for block, low, high in _blocks(start, stop):
            rng = generator(self.master, step.inputs, "hidden", block)
            parts.append(rng.standard_normal((BLOCK, width), np.float32)[low:high])
        return np.concatenate(parts) if parts else np.zeros((0, width), np.float32)

    def lattice_row(self, step: Replay, row: int) -> bool:
        """Whether a row's query is of the lattice regime."""
        return step.regime == "lattice" or (step.regime == "mixed" and (row % 2 == 0 or row == zero_row(step.rows)))

    def zero_row(self, step: Replay) -> int | None:
        """The row whose query is all zero (every visible score ties at zero), or None."""
        return zero_row(step.rows) if step.regime in ("lattice", "mixed") and step.rows else None

    def tie_row(self, step: Replay, row: int) -> bool:
        """Whether a row's cutoff falls into the planted tie class (every other lattice row; needs a planted class)."""
        return bool(self.case.tie_stride) and self.lattice_row(step, row) and row % 2 == 0 and row != self.zero_row(step)

    def queries(self, step: Replay, start: int, stop: int) -> tuple[U8, F32]:
        """Index queries and head weights of rows [start, stop), by the regime of each row."""
        ix = self.geometry.indexer
        width = ix.dim if self.formats.index == "fp8" else 4 * ix.dim
        query, weights = np.zeros((stop - start, ix.heads, width), np.uint8), np.zeros((stop - start, ix.heads), np.float32)
        for row in range(start, stop):
            rng = generator(self.master, step.inputs, "query", row)
            make = self._lattice_query if self.lattice_row(step, row) else self._natural_query
            query[row - start], weights[row - start] = make(rng, step, row)
        return query, weights

    def _natural_query(self, rng: np.random.Generator, step: Replay, row: int) -> tuple[U8, F32]:
        ix = self.geometry.indexer
        weights = (rng.standard_normal(ix.heads) * (ix.heads * ix.dim) ** -0.5 / 128).astype(np.float32)
        if self.formats.index != "fp8":
            return rng.standard_normal((ix.heads, ix.dim), np.float32).view(np.uint8), weights
        return _codes(rng, SPREAD, ix.heads, ix.dim), weights

    def _lattice_query(self, rng: np.random.Generator, step: Replay, row: int) -> tuple[U8, F32]:
        ix = self.geometry.indexer
        regions = Regions.of(ix.dim)
        weights = rng.choice(np.array([-2, -1, 1, 2], np.int8), ix.heads)
        weights[0] = abs(weights[0])
        query = rng.integers(-1, 2, (ix.heads, ix.dim), np.int8)
        sign = np.sign(weights)[:, None]
        query[:, : regions.beacon] = sign
        if self.tie_row(step, row):
            query[:, regions.beacon : regions.beacon + regions.tie] = sign
        if row == self.zero_row(step):
            query[:] = 0
        return self._stored(query), weights.astype(np.float32)


def _blocks(start: int, stop: int) -> list[tuple[int, int, int]]:
    """(block, low, high): the parts of [start, stop) inside each block."""
    spanned = range(start // BLOCK, -(-stop // BLOCK)) if stop > start else ()
    return [(b, max(start - b * BLOCK, 0), min(stop - b * BLOCK, BLOCK)) for b in spanned]


def _owners(ids: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(block, places in ``ids`` of its members), each block once."""
    owner = np.asarray(ids) // BLOCK
    for block in np.unique(owner):
        yield int(block), np.flatnonzero(owner == block)


def _sparse(rng: np.random.Generator, n: int, width: int, most: int) -> NDArray[np.int8]:
    """[n, width] of {-1, 0, 1}, about 3/4 of ``most`` nonzeros a row and never more than ``most``."""
    draw = rng.integers(0, 256, (n, width), np.uint8)
    live = draw < min(255, max(1, 3 * 256 * most // (4 * width)))
    over = np.flatnonzero(np.count_nonzero(live, axis=1) > most)
    live[over] &= np.cumsum(live[over], axis=1) <= most
    return live * (2 * (draw & 1).astype(np.int8) - 1)
