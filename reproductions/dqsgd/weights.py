# SPDX-License-Identifier: Apache-2.0
"""What each step's quantization adds to the bound on the final loss; `thinwire.methods.strategies.gradients.bits`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from thinwire.methods.strategies.gradients.bits import contraction


def survivals(contractions: Sequence[float]) -> list[float]:
    r"""Return the part of each step's error that remains after the last step, $\prod_{k>t} \alpha_k$."""
    return list(accumulate(reversed(contractions[1:]), mul, initial=1.0))[::-1]


def error_weights(
    squares: Sequence[float],
    rates: Sequence[float],
    *,
    smoothness: float,
    strong_convexity: float = 0.0,
    share: float = 1.0,
) -> list[float]:
    r"""Return $a_t$: the error that each step's quantization adds to the final bound, times its squared levels.

    Args:
        squares: the squares of one worker's gradient at each step.
        rates: the learning rate of each step.
        smoothness: $L$.
        strong_convexity: $\mu$; with 0 all steps have equal weights.
        share: the mean square error divided by that of one worker's payload: $1/n$ if only workers quantize.
    """
    left = survivals([contraction(rate, smoothness, strong_convexity) for rate in rates])
    return [
        smoothness * rate**2 / 8 * share * square * survival
        for square, rate, survival in zip(squares, rates, left, strict=True)
    ]
