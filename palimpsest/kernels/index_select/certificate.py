"""How far a fast fp32 score can lie from the score of portable-1, and on what values that holds.

Exact path: D_h = q_h . k exact; s = fl32(scale * sum_h w_h relu(D_h)), the sum and the scaling in fp64.
Fast path:  r_h = relu(fp32 dot), S = fp32 sum of w_h r_h in any order, fused or not, a = fl32(S * scale).

Let Y = amax * W, amax = max_j |k_j| and W = sum_h |w_h| sum_j |q_hj|. An fp32 operation is taken to be off by a factor within
1 +- 2u, u = 2**-24: to nearest costs u, the other roundings (to odd, towards zero) of matrix units up to 2u. A product of e4m3
values is exact in fp32, and also where a GEMM rounds its inputs to bf16. heads < 2**15.

1. A term q_j k_j of a dot meets at most ``dim`` roundings whatever the order, so
   |dot - D_h| <= ((1+2u)**dim - 1) sum_j |q_j k_j|, and sum_j |q_j k_j| <= amax sum_j |q_j|. relu is 1-Lipschitz, so r_h is off
   by no more.
2. A term w_h r_h then meets at most ``heads`` (its product, the additions) and one more in the scaling:
   |a - scale sum_h w_h relu(D_h)| <= ((1+2u)**(dim + heads + 1) - 1) scale Y.
3. The exact path rounds heads + 1 times in fp64 and once to fp32: |s - scale sum_h w_h relu(D_h)| <= ((1+2u) - 1) scale Y,
   because (1 + 2**-53)**(heads + 1) (1 + u) <= 1 + 2u.
4. What is compared is fl(a - e) and fl(a + e). Besides e's share (see 5) that is one rounding of a number of at most
   scale Y (1 + 2u)**(dim + heads + 1), so it costs at most ((1+2u) - 1) times that.
   Together |s - a| and this rounding are within ((1+2u)**n - 1) scale Y for n = dim + heads + 4: each step adds one factor.
5. e itself is formed as W * (amax * scale * c) in fp32: W (its fp64 sum, then fp32), c and three products round, and so does
   e's own share of step 4. ``SPARE`` more factors of 1 + 2u on e keep the computed e above the bound.

Underflow. With scale in [TINY, HUGE], amax >= 2**-9 (or the key is zero and both paths give exactly 0) and c >= 2**-20, raising
W by TINY = 2**-40 raises e by at least 2**-69 scale >= 2**-109. Flushing to zero in the fast path costs less: an operand, a
product or a sum at most 2**-126, so (2 heads + 2) 2**-126 max(1, scale); a subnormal weight at most 2**-126 scale amax sum_j
|q_hj|. (Dots never are subnormal: they are multiples of 2**-18.) The exact path loses at most 2**-150.
Overflow. W <= WIDE, amax <= 448 and scale <= HUGE keep every intermediate below 2**127.
"""

#: the smallest and largest scale of a key that the filter takes, and what it adds to a row's weight
TINY, HUGE = 2.0**-40, 2.0**40
#: the largest W
WIDE = 2.0**60
#: roundings in forming the bound: seven, and one for what fp64 loses in forming c
SPARE = 8

_U32 = 2.0**-24


def slack(heads: int, dim: int) -> float:
    """c: |s - a| <= c * scale * amax * W, the rounding of both limits included."""
    base = (1 + 2 * _U32) ** (dim + heads + 4) - 1
    return base * (1 + 2 * _U32) ** SPARE


def bounded(mass: float) -> bool:
    """Whether a row of W = ``mass`` can be filtered; a NaN or an infinity in its query or weights makes this false."""
    return mass <= WIDE
