"""What turns projected index queries into records, element by element: rotation, Hadamard, quantisation, with the roundings of
``rope``, ``hadamard``
and ``fp8``, bit for bit, but in one pass over a head instead of one call per operation.
"""

from typing import Annotated, NamedTuple

import numpy as np

from palimpsest.kernels.jit import Array, kernel, piece

#: rotary layouts
NONE, HALF, INTERLEAVED = 0, 1, 2


class Record(NamedTuple):
    """How a record is formed, and scratch: line [2 * dim] fp32 and wide [dim] fp64."""

    layout: Annotated[int, "i8"]
    rope_dims: Annotated[int, "i8"]
    hadamard: Annotated[bool, "b1"]
    power_of_two: Annotated[bool, "b1"]
    line: Annotated[Array, "f4[::1]"]
    wide: Annotated[Array, "f8[::1]"]


@piece
def _rotate(row, angles, layout, dims):
    """Rotate the first ``dims`` of row [dim] by angles [dims/2, 2]; products are exact in fp64, each result is rounded once."""
    half = dims // 2
    for i in range(half):
        first, second = (i, i + half) if layout == HALF else (2 * i, 2 * i + 1)
        a, b = np.float64(row[first]), np.float64(row[second])
        cos, sin = np.float64(angles[i, 0]), np.float64(angles[i, 1])
        row[first] = np.float32(a * cos - b * sin)
        row[second] = np.float32(b * cos + a * sin)


@piece
def _hadamard(row, wide):
    """row [dim] times H / sqrt(dim): butterflies in fp64, one rounding, zeros are +0."""
    dim, step = row.shape[0], 1
    for d in range(dim):
        wide[d] = row[d]
    while step < dim:
        for first in range(0, dim, 2 * step):
            for i in range(first, first + step):
                low, high = wide[i], wide[i + step]
                wide[i], wide[i + step] = low + high, low - high
        step *= 2
    scale = np.float64(dim) ** -0.5
    for d in range(dim):
        row[d] = np.float32(wide[d] * scale + 0.0)


@piece
def _scale_of(row, bits, power_of_two):
    """max(amax, 1e-4) / 448, rounded up to a power of two when asked; inf where the row holds an infinity or a NaN."""
    largest = np.int32(0)
    for d in range(row.shape[0]):
        largest = max(largest, bits[d] & np.int32(0x7FFFFFFF))
    bits[0], kept = min(largest, np.int32(0x7F800000)), bits[0]
    scale = max(row[0], np.float32(1e-4)) / np.float32(448.0)
    if power_of_two:
        row[0] = scale
        bits[0] = (min(bits[0], np.int32(0x7F800000)) + np.int32(0x007FFFFF)) & np.int32(0x7F800000)
        scale = row[0]
    bits[0] = kept
    return scale


@piece
def _encode(row, scale, scratch, codes):
    """codes[d] = e4m3(clamp(row[d] / scale)), nearest even; NaN keeps its sign."""
    bits, dim = scratch.view(np.int32), row.shape[0]
    for d in range(dim):
        value = row[d] / scale
        value = np.float32(448.0) if value > np.float32(448.0) else value
        scratch[d] = np.float32(-448.0) if value < np.float32(-448.0) else value
    for d in range(dim):
        size = bits[d] & np.int32(0x7FFFFFFF)
        normal = (size - np.int32(120 << 23) + np.int32(0x7FFFF) + ((size >> np.int32(20)) & np.int32(1))) >> np.int32(20)
        # below 2^-6 codes are multiples of 2^-9: the addition rounds to one, and its low bits are the code
        small = np.abs(scratch[d]) * np.float32(512.0) + np.float32(8388608.0)
        scratch[dim + d] = small
        code = normal if size >= np.int32(121 << 23) else bits[dim + d] & np.int32(15)
        code = np.int32(0x7F) if size > np.int32(0x7F800000) else code
        codes[d] = np.uint8(code | ((bits[d] >> np.int32(24)) & np.int32(0x80)))


@kernel(Record, "f4[:,:,::1]", "f4[:,:,::1]", "u1[:,:,::1]", "f4[:,::1]")
def form_records(record, queries, angles, codes, weights):
    """queries [>= m, heads, dim] -> codes [m, heads, dim]; weights [m, heads] *= the scale of each query. angles [m or 0,
    pairs, 2]."""
    for row in range(codes.shape[0]):
        for head in range(codes.shape[1]):
            line = queries[row, head]
            if record.layout != NONE:
                _rotate(line, angles[row], record.layout, record.rope_dims)
            if record.hadamard:
                _hadamard(line, record.wide)
            scale = _scale_of(line, line.view(np.int32), record.power_of_two)
            _encode(line, scale, record.line, codes[row, head])
            weights[row, head] *= scale
