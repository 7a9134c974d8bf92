"""How far any correct compilation of an exported program may lie from the real numbers it stands for: a running error bound.

The graph is walked once in fp64. Every floating value carries ``error``: a bound on the distance between that fp64 number and
what any execution of the same graph gives that rounds each operation to its dtype, adds the terms of a sum in any order, fuses
or does not fuse a product with its addition, flushes subnormals or does not, and has exponentials within ``EXP_ULPS``. So two
executions may differ in every bit and both be right, and a program outside the bound is wrong. No number here was picked: unit
roundoffs u are the formats', and the fp64 walk's own roundings are counted in. Sums that cannot round (whole multiples of one
``grid``, too few of them to fill a significand) add no error: on such inputs the bound is tight, and 0 where nothing rounds.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_map

from palimpsest.core.errors import BadConfig
from palimpsest.prove.bounds import U64, compound

#: units in the last place of an exponential: what SLEEF's u10 functions and libm promise; one ulp is at most 2u
EXP_ULPS = 1
#: inputs are looked at for multiples of this
GRID = 2.0**-4
#: fp32 bits of -0, which ``programs.positive_zero`` turns into +0
_SIGN = -0x80000000

aten = torch.ops.aten


@dataclass
class Real:
    """Floating numbers of ``dtype``: ``value`` fp64, and ``error`` fp64, its distance from what an execution holds.

    grid: all values are whole multiples of it, and exact; 0 where that is not known
    """

    value: torch.Tensor
    error: torch.Tensor
    dtype: torch.dtype
    grid: float = 0.0

    @property
    def unit(self) -> float:
        """Half the distance from 1 to the next number of the dtype."""
        return torch.finfo(self.dtype).eps / 2

    @property
    def size(self) -> torch.Tensor:
        """At least the magnitude an execution holds."""
        return self.value.abs() + self.error


@dataclass(frozen=True)
class _Bits:
    """The bits of a ``Real`` seen as integers; ``negative_zero``: the mask of those that are -0."""

    real: Real
    negative_zero: bool = False


@dataclass
class _Walk:
    """One walk. roundings: of the longest path of this evaluation's own non-negative sums, for the last factor."""

    roundings: int = 0
    changed: dict[str, Real] = field(default_factory=dict)

    def rounded(self, value: torch.Tensor, error: torch.Tensor, dtype: torch.dtype, count: int = 1) -> Real:
        """``value``, off by ``error`` already, after ``count`` roundings to ``dtype`` here and as many to fp64 in this walk."""
        unit, tiny = torch.finfo(dtype).eps / 2, torch.finfo(dtype).tiny
        self.roundings += count + 8
        grown = compound(count, unit) + compound(count, U64)
        return Real(value, error + grown * (value.abs() + error) + count * tiny, dtype)


def _lift(x: Any, like: Real) -> Real:
    """A Python number as the dtype holds it."""
    if isinstance(x, Real):
        return x
    if isinstance(x, (_Bits, torch.Tensor)):
        raise BadConfig("no error bound for integer arithmetic mixed with rounded numbers; bound it in export/rounding.py")
    value = torch.tensor(float(x), dtype=torch.float64)
    return Real(value, value.abs() * like.unit if value.isfinite() else torch.zeros_like(value), like.dtype)


def _exact(grid: float, mass: torch.Tensor, dtype: torch.dtype) -> float:
    """``grid`` when sums of its multiples with at most this mass fit a significand of ``dtype`` (and so fp64's), else 0."""
    return grid if grid and bool((mass < grid / (torch.finfo(dtype).eps / 2)).all()) else 0.0


def _pair(a: Any, b: Any) -> tuple[Real, Real, torch.dtype]:
    like = a if isinstance(a, Real) else b
    a, b = _lift(a, like), _lift(b, like)
    return a, b, torch.promote_types(a.dtype, b.dtype)


def _add(walk: _Walk, a: Any, b: Any, *, combine: Callable[[Any, Any], Any] = operator.add) -> Real:
    a, b, dtype = _pair(a, b)
    if grid := _exact(min(a.grid, b.grid), a.size + b.size, dtype):
        return Real(combine(a.value, b.value), torch.zeros_like(a.value + b.value), dtype, grid)
    found = walk.rounded(combine(a.value, b.value), a.error + b.error, dtype)
    certain = a.value.isinf() & (a.error == 0) & b.value.isfinite()  # a masked place: minus infinity whatever is added
    return Real(found.value, torch.where(certain, 0.0, found.error), dtype)


def _sub(walk: _Walk, a: Any, b: Any) -> Real:
    return _add(walk, a, b, combine=operator.sub)


def _mul(walk: _Walk, a: Any, b: Any) -> Real:
    a, b, dtype = _pair(a, b)
    return walk.rounded(a.value * b.value, a.value.abs() * b.error + b.size * a.error, dtype)


def _div(walk: _Walk, a: Any, b: Any) -> Real:
    """|a/b - a'/b'| <= (da + |a/b| db) / (|b| - db); unknown where b may be 0."""
    a, b, dtype = _pair(a, b)
    quotient, least = a.value / b.value, b.value.abs() - b.error
    error = torch.where(least > 0, (a.error + quotient.abs() * b.error) / least, torch.inf)
    return walk.rounded(quotient, error, dtype)


def _mm(walk: _Walk, a: Real, b: Real) -> Real:
    """A term meets its product and at most depth - 1 additions, in any order; so does the fp64 product of this walk."""
    depth, dtype = a.value.shape[1], torch.promote_types(a.dtype, b.dtype)
    inherited, mass = a.value.abs() @ b.error + a.error @ b.size, a.size @ b.size
    if grid := _exact(a.grid * b.grid, mass, dtype):
        return Real(a.value @ b.value, inherited, dtype, grid)
    walk.roundings += 2 * depth + 8
    grown = compound(depth, torch.finfo(dtype).eps / 2) + compound(depth, U64)
    return Real(a.value @ b.value, inherited + grown * mass + depth * torch.finfo(dtype).tiny, dtype)


def _sum(walk: _Walk, a: Real, dims: list[int], keepdim: bool = False) -> Real:
    count = a.value.numel() // max(1, a.value.sum(dims).numel())
    walk.roundings += count + 8
    grown = compound(count - 1, a.unit) + compound(count - 1, U64)
    return Real(a.value.sum(dims, keepdim), a.error.sum(dims, keepdim) + grown * a.size.sum(dims, keepdim), a.dtype)


def _amax(walk: _Walk, a: Real, dims: list[int], keepdim: bool = False) -> Real:
    """The maximum moves by no more than its largest candidate does."""
    return Real(a.value.amax(dims, keepdim), a.error.amax(dims, keepdim), a.dtype)


def _exp(walk: _Walk, a: Real) -> Real:
    """e^(x + d) = e^x e^d, and the function is off by ``EXP_ULPS``."""
    value = a.value.exp()
    return walk.rounded(value, value * torch.expm1(a.error), a.dtype, 2 * EXP_ULPS)


def _sigmoid(walk: _Walk, a: Real) -> Real:
    """1 / (1 + e^-x): moves by at most a factor e^d; an exponential, an addition and a division round."""
    value = torch.sigmoid(a.value)
    return walk.rounded(value, value * torch.expm1(a.error), a.dtype, 2 * EXP_ULPS + 3)


def _to(walk: _Walk, a: Any, dtype: torch.dtype) -> Any:
    if not isinstance(a, Real):
        return a.to(dtype)
    old, new = torch.finfo(a.dtype), torch.finfo(dtype)
    if new.eps <= old.eps and new.max >= old.max and new.smallest_normal <= old.smallest_normal:
        return Real(a.value, a.error, dtype, a.grid)
    if dtype != torch.float32:
        raise BadConfig(f"no error bound for a conversion of {a.dtype} to {dtype}; bound it in export/rounding.py")
    return walk.rounded(a.value, a.error, dtype)


def _where(walk: _Walk, mask: Any, a: Any, b: Any) -> Any:
    if isinstance(mask, _Bits) and isinstance(b, _Bits) and mask.negative_zero and mask.real is b.real and a == 0:
        return b  # -0 becomes +0: the same number
    if isinstance(mask, _Bits) or isinstance(a, _Bits) or isinstance(b, _Bits):
        raise BadConfig("no error bound for integer arithmetic on the bits of a float")
    a, b, dtype = _pair(a, b)
    return Real(torch.where(mask, a.value, b.value), torch.where(mask, a.error, b.error), dtype)


def _bits(walk: _Walk, a: Any, dtype: torch.dtype) -> Any:
    if isinstance(a, Real) and (a.dtype, dtype) == (torch.float32, torch.int32):
        return _Bits(a)
    if isinstance(a, _Bits) and dtype == a.real.dtype and not a.negative_zero:
        return a.real
    raise BadConfig(f"no error bound for a view as {dtype}")


def _equal(walk: _Walk, a: Any, number: int) -> Any:
    if not isinstance(a, _Bits) or number != _SIGN:
        raise BadConfig("no error bound for a comparison of rounded numbers: it may turn out either way")
    return _Bits(a.real, negative_zero=True)


#: rules of operations that round or mix; every other operation on a ``Real`` is refused
RULES: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _add, aten.sub.Tensor: _sub, aten.mul.Tensor: _mul, aten.div.Tensor: _div, aten.mm.default: _mm,
    aten.sum.dim_IntList: _sum, aten.amax.default: _amax, aten.exp.default: _exp, aten.sigmoid.default: _sigmoid,
    aten.to.dtype: _to, aten.where.self: _where, aten.where.ScalarOther: _where, aten.where.ScalarSelf: _where,
    aten.view.dtype: _bits, aten.eq.Scalar: _equal,
}  # fmt: skip
#: operations that only move elements: values and errors go the same way
MOVES = (
    aten.slice.Tensor, aten.t.default, aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten.cat.default,
    aten.index.Tensor, aten.pad.default,
)  # fmt: skip


def _apply(walk: _Walk, node: Node, args: Any, kwargs: Any) -> Any:
    known = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, (Real, _Bits))]
    if not known:
        return cast(Callable[..., Any], node.target)(*args, **kwargs)  # nodes of kind call_function
    reals = [x for x in known if isinstance(x, Real)]
    if node.target in MOVES and len(reals) == len(known):
        value, error = (node.target(*tree_map(pick, args), **kwargs) for pick in (_value, _error))
        return Real(value, error, reals[0].dtype, min(x.grid for x in reals))
    if node.target not in RULES or kwargs:
        raise BadConfig(f"no error bound for {node.target} in this program; add its rule to export/rounding.py")
    return RULES[node.target](walk, *args)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Real) else x


def _error(x: Any) -> Any:
    return x.error if isinstance(x, Real) else x


def _given(tensor: torch.Tensor) -> Real:
    wide = tensor.to(torch.float64)
    grid = GRID if bool((wide / GRID == (wide / GRID).round()).all()) else 0.0
    return Real(wide, torch.zeros_like(wide), tensor.dtype, grid)


def bounded(program: ExportedProgram, inputs: list[torch.Tensor]) -> dict[int, Real]:
    """Changed argument -> what it must hold after ``program`` ran on ``inputs``, which stay as they are.

    Raises BadConfig naming an operation without a rule: then nothing is known, and nothing is passed off as checked.
    """
    walk, values, places = _Walk(), {}, {}
    given = iter(enumerate(inputs))
    for node in program.module().graph.nodes:
        if node.op == "placeholder":
            at, tensor = next(given)
            places[node.name] = at
            values[node] = _given(tensor) if tensor.is_floating_point() else tensor
        elif node.op == "call_function" and node.target is not aten._assert_tensor_metadata.default:
            args, kwargs = (
                tree_map(lambda x: values[x] if isinstance(x, Node) else x, part) for part in (node.args, node.kwargs)
            )
            if node.target is aten.copy_.default:
                made = _to(walk, args[1], args[0].dtype)
                walk.changed[node.args[0].name] = values[node.args[0]] = made
            else:
                values[node] = _apply(walk, node, args, kwargs)
    slack = 1 + compound(walk.roundings, U64)  # of the errors' own evaluation: sums and products of non-negative numbers
    return {places[name]: Real(one.value, one.error * slack, one.dtype) for name, one in walk.changed.items()}


def share(found: torch.Tensor, wanted: Real) -> float:
    """The largest part of its bound that an element of ``found`` uses: at most 1 when the program may be right, NaN counts as
    infinite.
    """
    off = (found.to(torch.float64) - wanted.value).abs()
    used = torch.where(off == 0, 0.0, off / wanted.error)
    return float(torch.nan_to_num(used, nan=torch.inf, posinf=torch.inf).max())
