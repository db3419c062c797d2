# SPDX-License-Identifier: Apache-2.0
r"""The arithmetic of quantization errors: how to divide bits among steps, and among the parts of a vector.

A code of $b$ bits has $s = 2^{b-1} - 1$ levels on each side of zero. Where a block of $d_i$ entries with largest
magnitude $N_i$ is rounded to them at random without bias, the square of its error is at most $d_i N_i^2 / 4s^2$ in
expectation; $S = \sum_i d_i N_i^2$ is called a vector's *square* here. If a step of gradient descent with rate
$\eta_t$ uses the mean over $n$ workers of such vectors, its quantization adds, on an $L$-smooth and $\mu$-strongly
convex function, to the bound on $F(x_T) - F^*$ at most

$$\frac{a_t}{s_t^2}, \qquad a_t = \frac{L \eta_t^2}{8 n} S_t \prod_{k>t} \alpha_k, \qquad
  \alpha_k = 1 - 2 \mu \eta_k + L \mu \eta_k^2 .$$

The fewest bits that keep the sum of these below $\epsilon$ let every step contribute the same,
$s_t = \sqrt{T a_t / \epsilon}$; the least sum for given bits has $s_t \propto \sqrt{a_t}$.

Yan et al., DQ-SGD: Dynamic Quantization in SGD for Communication-Efficient Distributed Learning, 2021,
arXiv:2107.14575; constants and the forms over parts and over remaining steps are derived here.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from math import ceil, inf, log2, sqrt
from operator import mul

import torch
from torch import Tensor

LEAST, MOST = 2, 8
# A bit is granted while the error less 61 % of what the bit would remove still exceeds the target. One bit divides an
# error by four; with this threshold the errors that result average to the target.
_LEAN = 0.61


def levels_of(bits: int) -> int:
    """Levels on each side of zero of a code of that many bits."""
    return 2 ** (bits - 1) - 1


def bits_of(levels: float, *, least: int = LEAST, most: int = MOST) -> int:
    """The fewest whole bits with as many levels, within bounds."""
    return min(max(1 + ceil(log2(levels + 1)), least), most)


def square_of(x: Tensor, block: int) -> Tensor:
    """The square of a vector whose blocks each have a scale: a number in double precision, where the vector is."""
    whole, total = x.numel() // block * block, x.new_zeros((), dtype=torch.float64)
    for rows in (x[:whole].view(-1, block), x[whole:].view(1, -1)):
        if rows.numel():
            # Several times as fast as the maximum norm, and NaN and infinity show in it just the same.
            largest = torch.maximum(rows.amax(1), -rows.amin(1))
            total = total + rows.shape[1] * largest.double().square().sum()
    return total


def contraction(lr: float, smoothness: float, strong_convexity: float) -> float:
    r"""$\alpha = 1 - 2\mu\eta + L\mu\eta^2$: one step's factor of the distance to the optimum; 1 without convexity."""
    return 1 - 2 * strong_convexity * lr + smoothness * strong_convexity * lr**2


def survivals(contractions: Sequence[float]) -> list[float]:
    r"""The part of each step's error that remains after the last step, $\prod_{k>t} \alpha_k$."""
    return list(accumulate(reversed(contractions[1:]), mul, initial=1.0))[::-1]


def error_weights(
    squares: Sequence[float],
    rates: Sequence[float],
    *,
    smoothness: float,
    strong_convexity: float = 0.0,
    share: float = 1.0,
) -> list[float]:
    r"""The error that each step's quantization adds to the final bound, times its squared levels ($a_t$).

    Args:
        squares: of one worker's gradient at each step.
        rates: the learning rate of each step.
        smoothness: $L$.
        strong_convexity: $\mu$; 0 where there is none: all steps then weigh the same.
        share: the mean square error over that of one worker's code: one over their number, where only workers round.
    """
    left = survivals([contraction(rate, smoothness, strong_convexity) for rate in rates])
    return [
        smoothness * rate**2 / 8 * share * square * survival
        for square, rate, survival in zip(squares, rates, left, strict=True)
    ]


def levels_within(weights: Sequence[float], error: float) -> list[float]:
    """The cheapest levels for which weights over squared levels add up to `error` (rule A), not rounded."""
    return [sqrt(len(weights) * weight / error) for weight in weights]


def levels_for(weights: Sequence[float], bits: float) -> list[float]:
    """The levels of least error whose binary logarithms add up to `bits` (rule B), not rounded; no weight is zero."""
    mean = sum(log2(weight) for weight in weights) / 2 / len(weights)
    return [2 ** (bits / len(weights) - mean) * sqrt(weight) for weight in weights]


def error_of(weights: Sequence[float], bits: Sequence[int]) -> float:
    """The error with these bits: the sum of weights over squared levels."""
    return sum(weight / levels_of(b) ** 2 for weight, b in zip(weights, bits, strict=True))


def fewest_bits(
    weights: Sequence[float],
    error: float,
    *,
    bound: float | None = None,
    sizes: Sequence[float] = (),
    least: int = LEAST,
    most: int = MOST,
) -> list[int]:
    """As few whole bits as keep the error within bounds; `most` everywhere if even that is too little.

    Bits go one by one to the part whose error they reduce most for their cost. This is optimal where all sizes are
    equal, and within one bit of one part of the optimum elsewhere.

    Args:
        weights: of the steps, or of the parts of a vector.
        error: that weights over squared levels may add up to.
        bound: that they must not exceed; where it is given, `error` is a target, from above or below.
        sizes: the cost of a bit for each of them; the same for all unless given.
        least: bits that each gets.
        most: bits that none exceeds.
    """
    # Sums of many numbers are wrong in their last digits.
    limits = (error, error) if bound is None else (error, bound)
    limits = (limits[0], limits[1] * (1 + 1e-12))
    return _spent(weights, sizes or [1.0] * len(weights), least, most, limits=limits)


def best_bits(
    weights: Sequence[float], bits: float, *, sizes: Sequence[float] = (), least: int = LEAST, most: int = MOST
) -> list[int]:
    """The whole bits of least error within a budget; `least` everywhere even if that exceeds it.

    Args:
        weights: of the steps, or of the parts of a vector.
        bits: the budget, for the sum of bits times sizes.
        sizes: the cost of a bit for each of them; the same for all unless given.
        least: bits that each gets.
        most: bits that none exceeds.
    """
    return _spent(weights, sizes or [1.0] * len(weights), least, most, budget=bits)


def _spent(
    weights: Sequence[float],
    sizes: Sequence[float],
    least: int,
    most: int,
    *,
    limits: tuple[float, float] = (-inf, -inf),
    budget: float = inf,
) -> list[int]:
    """Greedy: one bit at a time, from a heap of the parts by the reduction of the error over the cost of a bit."""
    error, bound = limits
    bits = [least] * len(weights)
    left, now = budget - least * sum(sizes), error_of(weights, bits)
    # Reductions of the error per cost, negated because heapq keeps the smallest first.
    heap = [(-_gain(weight, least) / size, i) for i, (weight, size) in enumerate(zip(weights, sizes, strict=True))]
    heapify(heap)
    while heap and heap[0][0] < inf and (now > bound or now + _LEAN * heap[0][0] * sizes[heap[0][1]] > error):
        gain, i = heap[0]
        if bits[i] == most or sizes[i] > left:
            # This part is full, or too large for what is left: it goes to the end.
            heapreplace(heap, (inf, i))
            continue
        bits[i] += 1
        left, now = left - sizes[i], now + gain * sizes[i]
        heapreplace(heap, (-_gain(weights[i], bits[i]) / sizes[i], i))
    return bits


def _gain(weight: float, bits: int) -> float:
    """By how much one bit more lowers the error."""
    return weight / levels_of(bits) ** 2 - weight / levels_of(bits + 1) ** 2
