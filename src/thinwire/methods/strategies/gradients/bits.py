# SPDX-License-Identifier: Apache-2.0
r"""The arithmetic of quantization errors, to divide bits among steps and among the parts of a vector.

A code of $b$ bits has $s = 2^{b-1} - 1$ levels on each side of zero. If a block of $d_i$ entries with largest magnitude
$N_i$ is rounded to them at random without bias, the expected square of its error is at most $d_i N_i^2 / 4s^2$. Here
$S = \sum_i d_i N_i^2$ is called a vector's *square*. If a step of gradient descent with rate $\eta_t$ uses the mean
over $n$ workers of such vectors, on an $L$-smooth and $\mu$-strongly convex function, quantization adds to the bound
on $F(x_T) - F^*$ at most

$$\frac{a_t}{s_t^2}, \qquad a_t = \frac{L \eta_t^2}{8 n} S_t \prod_{k>t} \alpha_k, \qquad
  \alpha_k = 1 - 2 \mu \eta_k + L \mu \eta_k^2 .$$

With the fewest bits for which the sum of these is $\epsilon$, every step contributes equally,
$s_t = \sqrt{T a_t / \epsilon}$. With a given number of bits, the sum is least for $s_t \propto \sqrt{a_t}$.

Yan et al., DQ-SGD: Dynamic Quantization in SGD for Communication-Efficient Distributed Learning, 2021,
arXiv:2107.14575. The constants, and the forms for parts and for remaining steps, are our own derivations.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import inf

import torch
from torch import Tensor

LEAST, MOST = 2, 8
# A bit is granted while the error, minus 61 % of the reduction by the bit, still exceeds the target. One bit divides an
# error by four, and with this threshold the resulting errors average to the target.
_LEAN = 0.61


def levels_of(bits: int) -> int:
    """Return the levels on each side of zero of a code with this many bits."""
    return 2 ** (bits - 1) - 1


def square_of(x: Tensor, block: int) -> Tensor:
    """Compute the square of a vector with a scale for each block, fp64 [], on its device."""
    whole, total = x.numel() // block * block, x.new_zeros((), dtype=torch.float64)
    for rows in (x[:whole].view(-1, block), x[whole:].view(1, -1)):
        if rows.numel():
            # Several times as fast as the maximum norm, and it also keeps NaN and infinity.
            largest = torch.maximum(rows.amax(1), -rows.amin(1))
            total = total + rows.shape[1] * largest.double().square().sum()
    return total


def contraction(lr: float, smoothness: float, strong_convexity: float) -> float:
    r"""$\alpha = 1 - 2\mu\eta + L\mu\eta^2$: one step's factor of the distance to the optimum; 1 without convexity."""
    return 1 - 2 * strong_convexity * lr + smoothness * strong_convexity * lr**2


def error_of(weights: Sequence[float], bits: Sequence[int]) -> float:
    """Return the error with these bits: the sum of weights over squared levels."""
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
    """Return the fewest whole bits that keep the error within bounds; `most` everywhere if even these do not.

    Bits go one by one to the part whose error they reduce most for their cost. This is optimal for equal sizes, and
    otherwise within one bit of one part of the optimum.

    Args:
        weights: the weights of the steps, or of the parts of a vector.
        error: the limit of the sum of weights over squared levels; with a `bound`, its target.
        bound: the limit of that sum, if it differs from the target.
        sizes: the cost of a bit for each step or part; by default equal.
        least: the fewest bits of each.
        most: the most bits of each.
    """
    # Sums of many numbers are wrong in their last digits.
    limits = (error, error) if bound is None else (error, bound)
    limits = (limits[0], limits[1] * (1 + 1e-12))
    return _spent(weights, sizes or [1.0] * len(weights), least, most, limits=limits)


def best_bits(
    weights: Sequence[float], bits: float, *, sizes: Sequence[float] = (), least: int = LEAST, most: int = MOST
) -> list[int]:
    """Return the whole bits of least error within a budget; `least` everywhere even if that exceeds it.

    Args:
        weights: the weights of the steps, or of the parts of a vector.
        bits: the budget, for the sum of bits times sizes.
        sizes: the cost of a bit for each step or part; by default equal.
        least: the fewest bits of each.
        most: the most bits of each.
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
    """Grant one bit at a time to the part with the largest reduction of the error per cost, from a heap."""
    error, bound = limits
    bits = [least] * len(weights)
    left, now = budget - least * sum(sizes), error_of(weights, bits)
    # Reductions of the error per cost, negated because heapq keeps the smallest first.
    heap = [(-_gain(weight, least) / size, i) for i, (weight, size) in enumerate(zip(weights, sizes, strict=True))]
    heapify(heap)
    while heap and heap[0][0] < inf and (now > bound or now + _LEAN * heap[0][0] * sizes[heap[0][1]] > error):
        gain, i = heap[0]
        if bits[i] == most or sizes[i] > left:
            # This part has `most` bits, or exceeds the rest of the budget: it moves to the end.
            heapreplace(heap, (inf, i))
            continue
        bits[i] += 1
        left, now = left - sizes[i], now + gain * sizes[i]
        heapreplace(heap, (-_gain(weights[i], bits[i]) / sizes[i], i))
    return bits


def _gain(weight: float, bits: int) -> float:
    """Return the reduction of the error by one more bit."""
    return weight / levels_of(bits) ** 2 - weight / levels_of(bits + 1) ** 2
