"""Running error analysis: every value carries a bound on how far an fp32 evaluation in any summation order may be from it.

Values are fp64 (their own error, about 1e-16, is far below one fp32 roundoff and is covered by the +1 terms). Rules: Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., chapters 3 and 4; sums of n terms in any order obey (n-1)u (Rump, Bunger,
Jeannerod 2016). No constant is chosen here.
"""

from dataclasses import dataclass

import numpy as np

U = 2.0**-24  # unit roundoff of fp32


@dataclass(frozen=True)
class Bounded:
    """``value`` and ``bound``: an fp32 evaluation lies within ``bound`` of ``value``, elementwise."""

    value: np.ndarray
    bound: np.ndarray

    def __getitem__(self, key) -> "Bounded":
        return Bounded(self.value[key], self.bound[key])

    def reshape(self, *shape: int) -> "Bounded":
        return Bounded(self.value.reshape(*shape), self.bound.reshape(*shape))

    @property
    def largest(self) -> np.ndarray:
        return np.abs(self.value) + self.bound


def exact(value: np.ndarray) -> Bounded:
    value = value.astype(np.float64)
    return Bounded(value, np.zeros_like(value))


def rounded(value: np.ndarray, bound: np.ndarray, roundings: int = 1) -> Bounded:
    return Bounded(value, bound + ((1 + U) ** roundings - 1) * (np.abs(value) + bound))


def matmul(a: Bounded, b: Bounded) -> Bounded:
    """``a @ b``, both inexact, n products summed in any order: n roundings of every term."""
    n = a.value.shape[-1]
    carried = a.bound @ np.abs(b.value) + a.largest @ b.bound
    return Bounded(a.value @ b.value, carried + ((1 + U) ** n - 1) * (a.largest @ b.largest))


def transpose(a: Bounded) -> Bounded:
    return Bounded(np.swapaxes(a.value, -1, -2), np.swapaxes(a.bound, -1, -2))


def linear(x: Bounded, weight: np.ndarray) -> Bounded:
    return matmul(x, transpose(exact(weight)))


def scaled(x: Bounded, factor: float) -> Bounded:
    return rounded(x.value * factor, x.bound * abs(factor), 2)  # the factor itself is rounded, then the product


def _normalise(x: Bounded, eps: float, gain: np.ndarray) -> Bounded:
    """x * rsqrt(mean(x**2) + eps) * gain: n + 3 roundings in the mean, 3 in the root and the two products."""
    n = x.value.shape[-1]
    mean = np.mean(x.value**2, axis=-1, keepdims=True) + eps
    wrong = np.mean(2 * np.abs(x.value) * x.bound + x.bound**2, axis=-1, keepdims=True)
    relative = (wrong + ((1 + U) ** (n + 3) - 1) * (mean + wrong)) / mean
    assert np.all(relative < 1)
    root = (1 - relative) ** -0.5 - 1  # relative error of the reciprocal root, from the smallest possible mean
    value = x.value * mean**-0.5 * gain
    carried = x.bound * mean**-0.5 * np.abs(gain) * (1 + root) + np.abs(value) * root
    return rounded(value, carried, 4)


def rms_norm(x: Bounded, weight: np.ndarray, eps: float) -> Bounded:
    return _normalise(x, eps, weight.astype(np.float64))


def layer_norm(x: Bounded, weight: np.ndarray, bias: np.ndarray, eps: float) -> Bounded:
    n = x.value.shape[-1]
    mean = x.value.mean(-1, keepdims=True)
    wrong = x.bound.mean(-1, keepdims=True) + ((1 + U) ** n - 1) * x.largest.mean(-1, keepdims=True)
    centred = rounded(x.value - mean, x.bound + wrong)
    normal = _normalise(centred, eps, weight.astype(np.float64))
    return rounded(normal.value + bias, normal.bound)


def rope(x: Bounded, angle: np.ndarray, layout: str) -> Bounded:
    """Rotate the last axis by the fp32 ``angle`` [..., dims/2]; cos and sin carry at most 2 ulp (4 u), products and sums 1 u."""
    cos, sin = np.cos(angle), np.sin(angle)
    half = x.value.shape[-1] // 2
    first, second = (slice(0, half), slice(half, None)) if layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    value, bound = np.empty_like(x.value), np.empty_like(x.bound)
    for out, (p, q, sign) in {"first": (first, second, -1.0), "second": (second, first, 1.0)}.items():
        where = first if out == "first" else second
        value[..., where] = x.value[..., p] * cos + sign * x.value[..., q] * sin
        size = x.largest[..., p] * np.abs(cos) + x.largest[..., q] * np.abs(sin)
        tables = 4 * U * (x.largest[..., p] + x.largest[..., q])
        carried = x.bound[..., p] * np.abs(cos) + x.bound[..., q] * np.abs(sin)
        bound[..., where] = carried + tables + ((1 + U) ** 3 - 1) * (size + tables)
    return Bounded(value, bound)


def attend(logits: Bounded, values: Bounded, mask: np.ndarray) -> Bounded:
    """softmax(logits where mask) @ values. exp carries 2 ulp (4 u); numerator and denominator share each term's error."""
    n = int(mask.sum(-1).max())
    s = np.where(mask, logits.value, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    p /= p.sum(-1, keepdims=True)
    delta = np.where(mask, logits.bound, 0.0)
    exponent = delta + delta.max(-1, keepdims=True) + U * np.where(mask, top - logits.value + 2 * delta, 0.0)
    eta = np.where(mask, np.expm1(exponent) + 4 * U * np.exp(exponent), 0.0)
    out = p @ values.value
    spread = np.einsum(
        "...n,...nd->...d", p * eta, np.abs(values.value[..., None, :, :]) if values.value.ndim > p.ndim else np.abs(values.value)
    )
    spread = spread + np.abs(out) * (p * eta).sum(-1, keepdims=True)
    sums = (1 + U) ** (2 * n + 4) - 1  # weighted sum, row sum, quotient, and P stored in fp32
    weight = p * (1 + eta)
    first = spread + weight @ values.bound + sums * (weight @ values.largest)
    denominator = (p * eta).sum(-1, keepdims=True) + sums
    assert np.all(denominator < 1)
    return rounded(out, first / (1 - denominator))
