"""Plain fp64 pieces the reference implementations share. Written for reading, not for speed; shares nothing with the portable
engine.

Arrays are numpy fp64 unless a name says otherwise. ``fp32`` marks every place where the arithmetic definition rounds.
"""

import math
from typing import Any

import numpy as np
import torch

from palimpsest.kernels.call import Call
from palimpsest.ranks.comm import Comm

Array = np.ndarray[Any, np.dtype[Any]]


def wide(tensor: torch.Tensor) -> Array:
    """Any float tensor as fp64, exactly."""
    return tensor.detach().to(torch.float64).numpy()


def fp32(values: Array) -> Array:
    """One rounding to fp32, kept as fp64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(np.float64)


def project(rows: Array, weight: torch.Tensor) -> Array:
    """``rows`` [n, depth] times ``weight`` [columns, depth] transposed, rounded once to fp32; zeros are +0."""
    return fp32(rows @ wide(weight).T + 0.0)


def store(target: torch.Tensor, values: Array) -> None:
    """Round ``values`` once to fp32, then to the target's dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        target.copy_(torch.from_numpy(values.astype(np.float32)))


def e4m3_values() -> Array:
    """[256] value of every e4m3 code, from the format's definition: bias 7, three mantissa bits, S.1111.111 is NaN."""
    values = np.empty(256)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        size = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
        values[code] = math.nan if exponent == 15 and mantissa == 7 else (-size if sign else size)
    return values


def e4m3_codes(values: Array) -> Array:
    """u8 codes of the nearest e4m3 values, ties to the even code, saturating at 448; NaN becomes 0x7f."""
    magnitudes = e4m3_values()[:127]  # [127] ascending, 0 .. 448
    size = np.minimum(np.abs(values), 448.0)
    upper = np.clip(np.searchsorted(magnitudes, size), 1, 126)
    lower = upper - 1
    below, above = size - magnitudes[lower], magnitudes[upper] - size  # both exact: neighbours differ by few bits
    up = (above < below) | ((above == below) & (upper % 2 == 0))
    codes = np.where(up, upper, lower) | np.where(np.signbit(values), 128, 0)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def quantise(values: Array, scale_format: str) -> tuple[Array, Array]:
    """``values`` [n, dim] fp32-valued -> codes [n, dim] u8 and scales [n] fp32-valued, one scale per row."""
    amax = np.max(np.abs(values), axis=1)  # [n]
    amax = np.where(np.isfinite(amax), np.maximum(amax, np.float64(np.float32(1e-4))), np.inf)
    scale = fp32(amax / 448.0)
    if scale_format == "ue8m0":
        scale = np.array([math.inf if math.isinf(s) else _next_power_of_two(s) for s in scale])
    with np.errstate(invalid="ignore"):
        return e4m3_codes(fp32(values / scale[:, None])), scale


def _next_power_of_two(value: float) -> float:
    mantissa, exponent = math.frexp(value)  # value = mantissa * 2**exponent with 0.5 <= mantissa < 1
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def rms_norm(values: Array, weight: Array, eps: float) -> Array:
    """``values`` [n, dim], ``weight`` [dim] -> fp32-valued [n, dim]"""
    return fp32(values / np.sqrt(np.mean(values**2, axis=1, keepdims=True) + eps) * weight)


def layer_norm(values: Array, weight: Array, bias: Array, eps: float) -> Array:
    """``values`` [n, dim], ``weight`` and ``bias`` [dim] -> fp32-valued [n, dim]"""
    centred = values - np.mean(values, axis=1, keepdims=True)
    return fp32(centred / np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + eps) * weight + bias)


def rotate(values: Array, table: Array, layout: str) -> Array:
    """``values`` [n, dims] turned by ``table`` [n, >= dims/2, 2] (cos, sin) -> fp32-valued [n, dims]"""
    dims = values.shape[1]
    out = values.copy()
    for pair in range(dims // 2):
        i, j = (pair, pair + dims // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
        cos, sin = table[:, pair, 0], table[:, pair, 1]
        out[:, i] = values[:, i] * cos - values[:, j] * sin
        out[:, j] = values[:, j] * cos + values[:, i] * sin
    return fp32(out)


def hadamard(values: Array) -> Array:
    """``values`` [n, dim] @ H / sqrt(dim) -> fp32-valued, with H[i, j] = (-1)**popcount(i & j)"""
    dim = values.shape[1]
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)])
    return fp32(values @ matrix * dim**-0.5 + 0.0)


def table_rows(call: Call, start: int, stop: int) -> Array | None:
    """Rows of the rope table [stop-start, pairs, 2], or None when the op has none."""
    return wide(call.view("rope")[start:stop]) if call.has("rope") else None


def broadcast(comm: Comm, source: int, tensor: torch.Tensor, label: str) -> None:
    """After this every rank's ``tensor`` (contiguous) holds the source's bytes."""
    if comm.rank == source:
        comm.exchange([(peer, tensor) for peer in range(comm.size) if peer != source], [], label)
    else:
        comm.exchange([], [(source, tensor)], label)
