"""Error bounds, derived from sizes and unit roundoffs; no number here was picked.

An ``Arithmetic`` says how an engine rounds. From it: how far a deployed score may lie from the real one (``score_error``), and
how far an attention output and its log-sum-exp may (``context_bound``, ``lse_bound``). Each derivation stands beside its formula.
``own_bound`` is the same formula for the oracle's fp64, so that a check never blames an engine for the oracle's rounding.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

#: unit roundoffs: half the distance from 1 to the next number
U64, U32, U_FP16, U_BF16, U_E4M3 = 2.0**-53, 2.0**-24, 2.0**-11, 2.0**-8, 2.0**-4
#: smallest normal fp32: an absolute error this large covers subnormal rounding and flush to zero
TINY32 = 2.0**-126
#: half the smallest subnormal fp32: what one rounding to fp32 can lose in absolute terms (without flush to zero)
HALF_SUBNORMAL32 = 2.0**-150


@dataclass(frozen=True)
class Arithmetic:
    """How an engine rounds: unit roundoffs u (0 where nothing rounds) and summation depths.

    index_dot_u: of one addition in an index dot; with fp64 and e4m3 nothing rounds whatever this says
    head_u, score_u: of the head sum and its scaling; of the stored score
    logit_dot_u, logit_u: of one operation in a logit's dot and scaling; of the stored logit
    sub_u, exp_eps: of ``s - m``; relative error of the exponential
    p_u: of the stored probability; sum_u: of one addition in PV and the row sum
    block: ids of one summation block, whose sums are added one after the other; 0 for a summation in any order
    online: the running maximum is rescaled once per block
    sum_rounded_p: the row sum adds the rounded probabilities
    div_u, out_u: of the final division, of the stored output
    record_u: of storing a record's value once its scale was applied in fp32, where that scale is no power of two
    provenance: where each number that is not the format's own comes from
    """

    name: str
    index_dot_u: float
    head_u: float
    score_u: float
    logit_dot_u: float
    logit_u: float
    sub_u: float
    exp_eps: float
    p_u: float
    sum_u: float
    block: int
    online: bool
    sum_rounded_p: bool
    div_u: float
    out_u: float
    provenance: str
    record_u: float = 0.0

    def depth(self, count: int) -> int:
        """Roundings a term of an n-term sum of products can meet: its product, the additions in its block, one a later block."""
        if not self.block:
            return max(1, count)
        return min(self.block, count) + -(-count // self.block)


#: the portable engine: fp64 scores and logits rounded once to fp32; fp32 exponentials; fp32 sums in blocks of 64; fp32 context
PORTABLE_1 = Arithmetic(
    name="portable-1",
    index_dot_u=U64,
    head_u=U64,
    score_u=U32,
    logit_dot_u=U64,
    logit_u=U32,
    sub_u=U32,
    exp_eps=2 * U32,
    p_u=0.0,
    sum_u=U32,
    block=64,
    online=False,
    sum_rounded_p=False,
    div_u=U32,
    out_u=0.0,
    provenance="formats: IEEE 754; block: the engine's contract; exp_eps: 1 ulp, documented for vector exponentials",
)

#: the amx engine: fp32 sums of exact bf16 products; p rounded to bf16, online softmax in blocks of 128. A sum of p @ values
#: adds one
#: term per 32 ids and so is shallower than its block; exp_eps holds for a degree-6 polynomial, its fp32 steps and 2^n
AMX_1 = Arithmetic(
    name="amx-1",
    index_dot_u=U32,
    head_u=U32,
    score_u=U32,
    logit_dot_u=U32,
    logit_u=2 * U32,
    sub_u=2 * U32,
    exp_eps=2.0**-21,
    p_u=U_BF16,
    sum_u=U32,
    block=128,
    online=True,
    sum_rounded_p=True,
    div_u=4 * U32,
    out_u=0.0,
    provenance=(
        "formats: IEEE 754 and TDPBF16PS (Intel SDM); block: the engine's contract; exp_eps: measured by a "
        "test over every exponent"
    ),
    record_u=U_BF16,
)

#: the avx engine: fp32 scores in a fixed order; attention is the portable engine's file
AVX_1 = dataclasses.replace(PORTABLE_1, name="avx-1", index_dot_u=U32, head_u=U32)

#: the avx512 engine: scores as the avx engine; attention in bf16 products like the amx engine's, but a chain of FMAs over pairs.
#: A dot of d products is two chains of d/2 and their sum, its scale rounds once: within the d + 2 of ``probability_error``. A
#: block's p @ values is one chain of at most 128 from +0, added by the FMA that rescales: within ``depth``. s - m and the
#: difference of two maxima round once each; the division is a quotient, a rounded record scale and a product
AVX512_1 = dataclasses.replace(
    AMX_1,
    name="avx512-1",
    provenance=(
        "formats: IEEE 754 and VDPBF16PS (Intel SDM), its order of roundings compared with the emulation at every start; "
        "block: the engine's contract; exp_eps: measured by a test over every exponent, less than half of it; what VDPBF16PS "
        "flushes of a dot of normal numbers (less than dim * 2^-125) is far below the rest"
    ),
)

#: the oracle's own arithmetic: fp64 throughout, sums in any order, an exponential good to 2 ulp
ORACLE_64 = Arithmetic(
    name="oracle-64",
    index_dot_u=U64,
    head_u=U64,
    score_u=0.0,
    logit_dot_u=U64,
    logit_u=0.0,
    sub_u=U64,
    exp_eps=4 * U64,
    p_u=U64,
    sum_u=U64,
    block=0,
    online=False,
    sum_rounded_p=True,
    div_u=U64,
    out_u=0.0,
    provenance="formats: IEEE 754; exp_eps: 2 ulp, libm",
)


def exact_dots(model: Arithmetic, format: str) -> bool:
    """Whether index dots of ``format`` records do not round: e4m3 products are multiples of 2**-18 below 2**18, so fp64 holds any
    sum of them, and no narrower format does."""
    return format == "fp8" and model.index_dot_u <= U64


def compound(count: float, u: float) -> float:
    """(1 + u)**count - 1: what ``count`` roundings of size ``u`` can make of a factor."""
    return float(np.expm1(count * np.log1p(u)))


def score_error(model: Arithmetic, *, value: F64, mass: F64, spread: F64 | None, heads: int, dim: int) -> F64:
    """E [n]: how far a deployed score can lie from s*.

    value [n]: s*, or its fp64 value; mass [n]: scale sum |w| relu(D); spread [n]: scale sum |w| sum_j |q k|, None when the dots
    are exact (e4m3 records with an accumulator of at least 45 bits). With |D^ - D| <= g sum_j |q k|, g = (1+u)**dim - 1, and relu
    1-Lipschitz, a term is off by |w| g a; it then meets 1 + (heads - 1) + 1 roundings (product, additions, scaling), and the sum
    is stored with one more:

        inner = g spread + ((1 + u)**(heads + 1) - 1) (mass + g spread)
        E = inner + u_score (|s*| + inner) + 2**-150

    The last factor covers the rounding of this evaluation itself: only sums and products of non-negative numbers.
    """
    if spread is None:
        assert model.index_dot_u <= U64, f"{model.name}: dots of e4m3 records are exact in fp64 only; pass the spread"
        drift = np.zeros_like(mass)
    else:
        drift = compound(dim, model.index_dot_u) * spread
    inner = drift + compound(heads + 1, model.head_u) * (mass + drift)
    stored = inner + model.score_u * (np.abs(value) + inner) + HALF_SUBNORMAL32
    return stored * (1 + (2 * heads + 2 * dim + 16) * U64)


def score_error_exact(
    model: Arithmetic, *, value: Fraction, mass: Fraction, spread: Fraction, heads: int, dim: int, exact_dots: bool
) -> Fraction:
    """``score_error`` of one score as a rational, for certificates; the same formula."""
    u_dot, u_head, u_score = Fraction(model.index_dot_u), Fraction(model.head_u), Fraction(model.score_u)
    drift = Fraction(0) if exact_dots else ((1 + u_dot) ** dim - 1) * spread
    inner = drift + ((1 + u_head) ** (heads + 1) - 1) * (mass + drift)
    return inner + u_score * (abs(value) + inner) + Fraction(1, 1 << 150)


@dataclass(frozen=True)
class Softmax:
    """The exact attention of one head over n records, as the bound needs it.

    logits, p [n]: s and softmax(s); spread [n]: scale sum_j |q_j k_ij|; values [n, c]; context [c]: sum p v
    size [n, c], most [c]: |values| and its largest of a column
    dim: elements of a dot; dequant_u: roundoff of turning a record into numbers, 0 when its scales are powers of two
    """

    logits: F64
    p: F64
    spread: F64
    values: F64
    context: F64
    dim: int
    dequant_u: float
    size: F64
    most: F64

    @staticmethod
    def of(
        logits: F64, spread: F64, values: F64, *, dim: int, dequant_u: float, sizes: tuple[F64, F64] | None = None
    ) -> "Softmax":
        """From logits and values; ``sizes`` are (size, most), where they are there already."""
        weight = np.exp(logits - logits.max())
        p = weight / weight.sum()
        size, most = sizes if sizes is not None else sizes_of(values)
        return Softmax(logits, p, spread, values, p @ values, dim, dequant_u, size, most)


def sizes_of(values: F64) -> tuple[F64, F64]:
    """|values| and its largest of each column."""
    size = np.abs(values)
    return size, size.max(axis=0)


@dataclass(frozen=True)
class Eta:
    """eta [n]: relative error of each unnormalised probability; numerator, denominator: of a term of PV and of the row sum."""

    eta: F64
    numerator: float
    denominator: float
    rho: float


def probability_error(model: Arithmetic, head: Softmax) -> Eta:
    """Relative error of the n unnormalised probabilities.

    logit:  a dot of d products and a scaling by c meets at most d + 2 roundings, its record one more (dequant_u):
            g = a ((1 + u_dq)(1 + u_dot)**(d+2) - 1), stored: Delta = g + u_logit (|s| + g) + 2**-150
    shift:  the maximum m cancels between numerator and denominator, its own error too; s - m is rounded (online: the running
            maxima telescope), which costs at most u_sub R, R = (M - s) + Delta + max Delta
    exp:    eta = exp(Delta + u_sub R) (1 + eps)**(1 + r) (1 + u_sum)**r - 1, with r = n/block rescalings when online, else 0
    sums:   a term of PV carries (1 + u_p)(1 + u_dq)(1 + u_sum)**h, of the row sum (1 + u_sum)**h, h the summation depth
    """
    n = len(head.p)
    grown = head.spread * ((1 + head.dequant_u) * (1 + compound(head.dim + 2, model.logit_dot_u)) - 1)
    delta = grown + model.logit_u * (np.abs(head.logits) + grown) + HALF_SUBNORMAL32
    reach = (head.logits.max() - head.logits) + delta + delta.max()
    rescales = -(-n // model.block) if model.online and model.block else 0
    factors = (1 + rescales) * np.log1p(model.exp_eps) + rescales * np.log1p(model.sum_u)
    eta = np.expm1(delta + model.sub_u * reach + factors)
    h = compound(model.depth(n), model.sum_u)
    numerator = (1 + model.p_u) * (1 + head.dequant_u) * (1 + h) - 1
    denominator = ((1 + model.p_u) * (1 + h) - 1) if model.sum_rounded_p else h
    rho = float(head.p @ ((1 + eta) * (1 + denominator) - 1)) + n * TINY32
    return Eta(eta, numerator, denominator, rho)


def context_bound(model: Arithmetic, head: Softmax, slack: F64 | float = 0.0) -> F64:
    """Bound [c] on |context^ - context|, componentwise; ``slack`` [c] is the error of ``head.context`` itself.

    With N^ = sum p (1+eta')(1+tau) v and D^ = sum p (1+eta')(1+sigma), the same eta' in both, and sum p (v - o) = 0,

        (N^ - o D^) = sum p eta' (v - o) + sum p (1+eta') tau v - o sum p (1+eta') sigma
        E0 = sum p eta |v - o| + t sum p (1+eta) |v| + w |o| sum p (1+eta),   E1 = E0 / (1 - rho)

    with t, w, rho from ``probability_error``. Underflow loses at most TINY32 per exponential and per product, against a row sum
    of at least exp(0) = 1. Division and the stored output round once each. Infinite when rho reaches 1: then nothing is known.
    """
    err = probability_error(model, head)
    if err.rho >= 1:
        return np.full(head.context.shape, np.inf)
    away = head.values - head.context
    np.abs(away, out=away)
    return _from(model, head, err, (head.p * err.eta) @ away, slack)


def _from(model: Arithmetic, head: Softmax, err: Eta, away: F64, slack: F64 | float) -> F64:
    """``context_bound`` from ``away`` [c], sum p eta |v - o| of the context as it stands."""
    n, weight, o = len(head.p), head.p * (1 + err.eta), np.abs(head.context) + slack
    away = away + slack * float((head.p * err.eta).sum())
    low = n * TINY32 * (2 * head.most + 1)
    e0 = away + err.numerator * (weight @ head.size) + err.denominator * o * weight.sum() + low
    e1 = e0 / (1 - err.rho)
    out = e1 + ((1 + model.div_u) * (1 + model.out_u) - 1) * (o + e1) + TINY32
    return out * (1 + (4 * n + 4 * head.dim + 64) * U64)


def own_bound(head: Softmax) -> F64:
    """Bound [c] on the oracle's own error: ``context_bound`` for fp64, its record values rounded to fp64 at most, with |v - o|
    taken as |v| + |o|."""
    exact = dataclasses.replace(head, dequant_u=U64 if head.dequant_u > 0 else 0.0)
    err = probability_error(ORACLE_64, exact)
    if err.rho >= 1:
        return np.full(head.context.shape, np.inf)
    pull = head.p * err.eta
    away = pull @ head.size + float(pull.sum()) * np.abs(head.context)
    first = _from(ORACLE_64, exact, err, away, 0.0)
    return _from(ORACLE_64, exact, err, away, 2 * first)


def lse_bound(model: Arithmetic, head: Softmax, lse: float) -> float:
    """Bound on |LSE^ - LSE| for LSE = M + ln(sum exp(s - M)).

    The row sum is off by a factor within 1 +- rho, m cancels, the logarithm (2 ulp) and the final addition round:
    -ln(1 - rho) + 4 u |ln L| + u (|LSE| + |ln L|) with u of the row sum.
    """
    rho = probability_error(model, head).rho
    if rho >= 1:
        return float("inf")
    log_sum = abs(lse - float(head.logits.max()))
    return float(-np.log1p(-rho) + model.sum_u * (5 * log_sum + abs(lse) + 1))


def exp_error(exp: Callable[[NDArray[np.float32]], NDArray[np.float32]], arguments: NDArray[np.float32]) -> float:
    """Largest relative error of an engine's fp32 exponential over ``arguments`` (all <= 0), in fp64 with normal results only.

    A probe for ``Arithmetic.exp_eps``: the qualifier records it beside the documented value and fails when it is larger.
    """
    exact = np.exp(arguments.astype(np.float64))
    normal = exact >= TINY32
    got = np.asarray(exp(arguments), np.float64)[normal]
    exact = exact[normal]
    return float(np.max(np.abs(got - exact) / exact)) if len(exact) else 0.0


def adds_blocks_once(
    addmm: Callable[[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]], NDArray[np.float32]], block: int
) -> bool:
    """Whether an engine's ``C + P @ V`` sums the block before it meets C, which is what ``Arithmetic.depth`` supposes of blocks.

    A probe. With C = 2**24, whose fp32 neighbours are 2 apart, and ``block`` products of 1, a sum that starts from C loses each 1
    to the tie rule and stays at C; a sum of the block first is exact. Both are also tried with C = -2**24, and at every row and
    column of the tile.
    """
    rows, columns = 8, 64
    for sign in (1, -1):
        c = np.full((rows, columns), sign * 2**24, np.float32)
        p, v = np.full((rows, block), sign, np.float32), np.ones((block, columns), np.float32)
        if not np.array_equal(addmm(c, p, v), np.full((rows, columns), sign * (2**24 + block), np.float32)):
            return False
    return True
