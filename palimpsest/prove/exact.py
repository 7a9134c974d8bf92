"""Scores without rounding: what the stored bytes mean as real numbers.

    s*(i) = scale_i * sum_h w_h * max(0, sum_j q_hj * k_ij)

e4m3 values are integers times 2**-9 and fit fp64 with room to spare, so their dots are exact in fp64 in any order; the head sum
is not, so it carries a bound (the filter), and what the filter cannot decide is decided with Python integers. Nothing here knows
how the layer was run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import total_ordering

import numpy as np
from numpy.typing import NDArray

#: token ids -> (value bytes [n, dim] or [n, 4 dim] u8, fp32 scales [n] or None), from the persistent cache
ReadIndex = Callable[[NDArray[np.int64]], tuple[NDArray[np.uint8], NDArray[np.float32] | None]]

#: unit roundoff of fp64
U64 = 2.0**-53


def _e4m3_table() -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(units of 2**-9, fp64 values) of the 256 codes: sign, 4 exponent bits of bias 7, 3 fraction bits; S.1111.111 is NaN."""
    units = np.zeros(256, np.int64)
    values = np.zeros(256, np.float64)
    for code in range(256):
        sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
        magnitude = fraction if exponent == 0 else (8 + fraction) << (exponent - 1)
        units[code] = -magnitude if sign else magnitude
        values[code] = math.copysign(math.ldexp(magnitude, -9), -1 if sign else 1)
    for code in (0x7F, 0xFF):
        units[code], values[code] = 0, math.nan
    units.setflags(write=False)
    values.setflags(write=False)
    return units, values


#: 256 codes as integers of 2**-9 (NaN codes read 0: ask ``nan_codes``), and as fp64 (NaN codes are NaN)
E4M3_UNITS, E4M3_VALUES = _e4m3_table()


def decode_e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """fp64 values of e4m3 codes, NaN for the two NaN codes; same shape."""
    return E4M3_VALUES[codes]


def nan_codes(codes: NDArray[np.uint8]) -> int:
    """How many codes are NaN."""
    return int(np.count_nonzero(codes & 0x7F == 0x7F))


def decode_bf16(raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    """fp64 values of little-endian bf16 bytes [..., 2 n] -> [..., n]."""
    wide = np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16
    return wide.view(np.float32).astype(np.float64)


def decode_fp32(raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    """fp64 values of little-endian fp32 bytes [..., 4 n] -> [..., n]."""
    return np.ascontiguousarray(raw).view("<f4").astype(np.float64)


def decode_activation(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """fp64 values of ``bf16``, ``fp32`` or ``e4m3`` bytes; the last axis shrinks by the element size."""
    return {"bf16": decode_bf16, "fp32": decode_fp32, "e4m3": decode_e4m3}[dtype](raw)


@total_ordering
@dataclass(frozen=True)
class Exact:
    """The number ``mantissa * 2**exponent``, with an odd mantissa, or 0 * 2**0. Equal numbers are equal objects."""

    mantissa: int
    exponent: int

    @staticmethod
    def of(mantissa: int, exponent: int) -> "Exact":
        """Any integer and exponent, brought to the one form."""
        if mantissa == 0:
            return Exact(0, 0)
        shift = (mantissa & -mantissa).bit_length() - 1
        return Exact(mantissa >> shift, exponent + shift)

    @staticmethod
    def from_float(value: float) -> "Exact":
        """A finite float. Raises ValueError for NaN and OverflowError for infinity."""
        top, bottom = float(value).as_integer_ratio()
        return Exact.of(top, 1 - bottom.bit_length())

    def __lt__(self, other: "Exact") -> bool:
        low = min(self.exponent, other.exponent)
        return self.mantissa << (self.exponent - low) < other.mantissa << (other.exponent - low)

    def __float__(self) -> float:
        return math.ldexp(self.mantissa, self.exponent)


def aligned(scores: Sequence[Exact]) -> list[int]:
    """The scores as integers of one common unit: order and equality are those of the integers."""
    low = min((s.exponent for s in scores), default=0)
    return [s.mantissa << (s.exponent - low) for s in scores]


#: token ids -> their exact scores
Refine = Callable[[NDArray[np.int64]], list[Exact]]


@dataclass(frozen=True)
class IndexRow:
    """One query row of the indexer.

    query:   [heads, dim] fp64, the exact values of its stored bytes
    weights: [heads] fp32
    format:  ``fp8`` or ``fp32`` (of query and keys)
    """

    query: NDArray[np.float64]
    weights: NDArray[np.float32]
    format: str

    @staticmethod
    def from_bytes(query: NDArray[np.uint8], weights: NDArray[np.float32], format: str) -> "IndexRow":
        """From raw bytes [heads, dim] e4m3 or [heads, 4 dim] fp32."""
        values = decode_e4m3(query) if format == "fp8" else decode_fp32(query)
        return IndexRow(values, np.asarray(weights, np.float32), format)


def decode_keys(values: NDArray[np.uint8], format: str) -> NDArray[np.float64]:
    """[n, dim] fp64 from the value bytes [n, dim] (fp8) or [n, 4 dim] (fp32)."""
    return decode_e4m3(values) if format == "fp8" else decode_fp32(values)


def _integers(values: NDArray[np.float64], unit: int) -> list[int]:
    """Exact integers of ``values * 2**unit``; raises AssertionError when one is not an integer."""
    out = []
    for value in values.tolist():
        top, bottom = value.as_integer_ratio()
        scaled = top << unit
        assert scaled % bottom == 0, f"{value} is not a multiple of 2**-{unit}"
        out.append(scaled // bottom)
    return out


def exact_score(row: IndexRow, key: NDArray[np.float64], scale: float) -> Exact:
    """s* of one key [dim] (fp64 values of its bytes) with its fp32 scale, by Python integers."""
    unit = 9 if row.format == "fp8" else 149
    if row.format == "fp8":
        dots = [int(d) for d in (row.query * 512).astype(np.int64) @ (key * 512).astype(np.int64)]
    else:
        ints = _integers(key, unit)
        dots = [sum(a * b for a, b in zip(_integers(q, unit), ints, strict=True)) for q in row.query]
    total = sum(w * d for w, d in zip(_integers(row.weights.astype(np.float64), 149), dots, strict=True) if d > 0)
    top, bottom = float(scale).as_integer_ratio()
    return Exact.of(total * top, 1 - bottom.bit_length() - 149 - 2 * unit)


@dataclass(frozen=True)
class Filtered:
    """fp64 scores of n keys with what their errors depend on.

    value:  [n], heads added in ascending order with separate multiplications and additions
    error:  [n], |value - s*| <= error; 0 where the fp64 arithmetic was exact
    mass:   [n], scale * sum |w| relu(dot), an upper bound of it up to fp64 rounding
    spread: [n], scale * sum |w| sum_j |q k| likewise, or None when dots are exact (fp8) and nobody asked
    """

    value: NDArray[np.float64]
    error: NDArray[np.float64]
    mass: NDArray[np.float64]
    spread: NDArray[np.float64] | None


def _odd_part(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """value = odd * 2**exponent elementwise (0 gives 0, 0), for values with at most 24 significant bits."""
    mantissa, exponent = np.frexp(values)
    whole = np.abs(mantissa * 2.0**24).astype(np.int64)
    lowest = np.where(whole, whole & -whole, 1)
    shift = np.frexp(lowest.astype(np.float64))[1] - 1
    return (whole >> shift).astype(np.float64), np.where(whole, exponent - 24 + shift, 0).astype(np.int64)


def filtered_scores(
    row: IndexRow, keys: NDArray[np.float64], scales: NDArray[np.float32] | None, *, spread: bool = False
) -> Filtered:
    """fp64 scores of ``keys`` [n, dim] with a rigorous error each. ``spread`` asks for the spread of fp8 records as well, which
    engines whose dots round need.

    Error: a term meets one rounding in ``w * relu``, at most heads - 1 in the sum and one in ``* scale``, so with exact dots
    |value - s*| <= ((1+u)**(heads+1) - 1) mass < (heads+2) u mass; computing mass itself loses at most the same share again,
    whence (heads+3) u. With fp32 records a dot of d exact products is off by at most d u sum |q k| (relu is 1-Lipschitz), whence
    the spread term. No
    fp64 product can underflow: the smallest factors are 2**-149 twice and 2**-298. Where every partial sum is a small enough
    integer of one unit, nothing rounds and the error is 0.
    """
    heads, dim = row.query.shape
    weights = row.weights.astype(np.float64)
    sigma = np.ones(len(keys)) if scales is None else np.asarray(scales, np.float32).astype(np.float64)
    dots = row.query @ keys.T
    np.maximum(dots, 0.0, out=dots)
    value = np.zeros(len(keys))
    for head in range(heads):
        value += weights[head] * dots[head]
    bare = np.abs(weights) @ dots
    value *= sigma
    mass = bare * np.abs(sigma)
    if row.format == "fp8":
        odd_w, exp_w = _odd_part(weights)
        low = exp_w[odd_w > 0].min(initial=0) if np.any(odd_w) else 0
        whole = np.ldexp(bare, 18 - int(low)) * np.maximum(_odd_part(sigma)[0], 1)
        error = np.where(whole <= 2**52, 0, (heads + 3) * U64 * mass)
        return Filtered(value, error, mass, _spread(row, keys, weights, sigma) if spread else None)
    wide = _spread(row, keys, weights, sigma)
    return Filtered(value, (heads + 3) * U64 * mass + (dim + heads + 4) * U64 * wide, mass, wide)


def _spread(
    row: IndexRow, keys: NDArray[np.float64], weights: NDArray[np.float64], sigma: NDArray[np.float64]
) -> NDArray[np.float64]:
    return np.asarray((np.abs(weights) @ (np.abs(row.query) @ np.abs(keys).T)) * np.abs(sigma))


@dataclass(frozen=True)
class Cutoff:
    """The exact top-m cutoff of a row.

    tau:   the m-th largest s*, or None when m is 0
    above: ids with s* > tau, ascending; equal: ids with s* = tau, ascending
    undecided: how many scores the fp64 filter could not place and integers did
    """

    m: int
    tau: Exact | None
    above: NDArray[np.int64]
    equal: NDArray[np.int64]
    undecided: int

    @property
    def needed(self) -> int:
        """Members of the cutoff class that a valid set holds."""
        return self.m - len(self.above)

    @property
    def tied(self) -> bool:
        """Whether a choice exists: not all of the class is needed."""
        return self.needed < len(self.equal)


def exact_cutoff(value: NDArray[np.float64], error: NDArray[np.float64], m: int, refine: Refine) -> Cutoff:
    """The exact cutoff from filtered scores; ``refine(ids) -> list[Exact]`` settles what the filter leaves open.

    An id whose lower end lies above the m-th largest upper end is above tau for sure; one whose upper end lies below the m-th
    largest lower end is below; everything between is compared as integers. Raises ValueError when a score is not finite.
    """
    n = len(value)
    none = np.zeros(0, np.int64)
    if m == 0:
        return Cutoff(0, None, none, none, 0)
    if not (0 < m <= n):
        raise ValueError(f"m = {m} must lie in 1..{n}")
    if not np.isfinite(value).all():
        raise ValueError(f"{int(np.count_nonzero(~np.isfinite(value)))} of {n} scores are not finite")
    slack = np.where(error > 0, error + 2 * U64 * (np.abs(value) + error), 0)
    low, high = value - slack, value + slack
    tau_low, tau_high = np.partition(low, n - m)[n - m], np.partition(high, n - m)[n - m]
    sure = low > tau_high
    open_ids = np.flatnonzero(~sure & (high >= tau_low))
    wanted = m - int(np.count_nonzero(sure))
    if not np.any(slack[open_ids]):
        values = value[open_ids]
        tau = np.partition(values, len(values) - wanted)[len(values) - wanted]
        above, equal = open_ids[values > tau], open_ids[values == tau]
        exact, undecided = Exact.from_float(float(tau)), 0
    else:
        scores = refine(open_ids)
        order = aligned(scores)
        cut = sorted(order, reverse=True)[wanted - 1]
        exact, undecided = scores[order.index(cut)], len(open_ids)
        above = open_ids[[v > cut for v in order]]
        equal = open_ids[[v == cut for v in order]]
    return Cutoff(m, exact, np.sort(np.concatenate([np.flatnonzero(sure), above])), equal, undecided)


def refiner(row: IndexRow, read_index: ReadIndex) -> Refine:
    """A ``refine`` for ``exact_cutoff`` that reads the records again and scores them with integers."""

    def refine(ids: NDArray[np.int64]) -> list[Exact]:
        values, scales = read_index(ids)
        keys = decode_keys(values, row.format)
        sigma = np.ones(len(ids), np.float32) if scales is None else scales
        return [exact_score(row, key, float(s)) for key, s in zip(keys, sigma, strict=True)]

    return refine
