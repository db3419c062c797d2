# SPDX-License-Identifier: Apache-2.0
"""Rules that choose the bits of each step: a fixed number, a bound on the error, or a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from math import isinf, isnan, log2, nan
from typing import Annotated

import torch
from torch import Tensor

from thinwire.core.validation import Range, check_range
from thinwire.methods.strategies.gradients.bits import (
    LEAST,
    MOST,
    best_bits,
    contraction,
    error_of,
    fewest_bits,
    levels_of,
)
from thinwire.registry import registered

_LEVEL_DECAY, _SLOPE_DECAY = 0.8, 0.95  # of the exponential means of log-squares and of their slope
_MOST_SLOPE_BITS = 2.0  # a slope adds or removes at most this many, because gradients do not shrink at a constant rate
_POINTS = 64  # the error is evaluated at this many of the remaining steps, of which a run may have millions


@dataclass(frozen=True)
class BitLedger:
    """The bits spent so far, and the resulting error.

    Args:
        step: the number of past steps.
        bits: the bits that a worker has sent per entry of its gradients, without scales.
        error: the error that quantization has added to the bound on the loss.
        level: an exponential mean of half the binary logarithm of squares; NaN before the first step.
        slope: an exponential mean of the level's change per step.
        answered: the bits per entry of the means that were sent back, which rules do not count.
    """

    step: int = 0
    bits: float = 0.0
    error: float = 0.0
    level: float = nan
    slope: float = 0.0
    answered: float = 0.0

    @staticmethod
    def read(numbers: Tensor) -> BitLedger:
        """Make a ledger from the result of `to_tensor`."""
        step, *rest = (float(number) for number in numbers.tolist())
        return BitLedger(int(step), *rest)

    def to_tensor(self) -> Tensor:
        """Return the six fields, fp64 [6]."""
        return torch.tensor(astuple(self), dtype=torch.float64, device="cpu")

    def after(self, bits: float, error: float, square: float) -> BitLedger:
        """Return the ledger one step later."""
        level, slope = self.level, self.slope
        # A zero gradient has no logarithm, and must not lower the mean forever.
        if square > 0:
            now = log2(square) / 2
            known = now if isnan(level) else level
            level = _LEVEL_DECAY * known + (1 - _LEVEL_DECAY) * now
            slope = _SLOPE_DECAY * slope + (1 - _SLOPE_DECAY) * (level - known)
        return BitLedger(self.step + 1, self.bits + bits, error, level, slope, self.answered)

    def with_answer(self, bits: float) -> BitLedger:
        """Return the ledger with the bits of the last step's mean added."""
        return replace(self, answered=self.answered + bits)


@dataclass(frozen=True)
class Step:
    """The inputs of a rule for a step.

    Args:
        squares: the squares of one worker's gradient, for each part, of this step, or of the previous step as an
            estimate; infinite if unknown.
        sizes: the entries of each part.
        lr: the learning rate.
        share: the mean square error, in units of that of one worker's payload and of 1/4 of a level's square.
    """

    squares: Sequence[float]
    sizes: Sequence[int]
    lr: float
    share: float

    @property
    def square(self) -> float:
        """The square of the whole gradient."""
        return sum(self.squares)

    def mean_bits(self, bits: Sequence[int]) -> float:
        """Return the mean bits per entry over all parts."""
        return sum(b * size for b, size in zip(bits, self.sizes, strict=True)) / max(1, sum(self.sizes))


class _Rule:
    """A rule that does not count the error of quantization."""

    def settle(self, ledger: BitLedger, step: Step, bits: Sequence[int]) -> BitLedger:
        """Return the ledger after a step whose squares are known."""
        return ledger.after(step.mean_bits(bits), 0.0, step.square)


Steps = Annotated[int, Range("1..", "Give the number of optimizer steps of the run")]
Least = Annotated[int, Range(f"{LEAST}..{MOST}", f"{LEAST} is usual")]
Most = Annotated[int, Range(f"{{least}}..{MOST}", f"{MOST} is usual")]


@registered
class FixedBits(_Rule):
    """Use the same bits at every step, like the baselines of Yan et al., DQ-SGD, 2021, arXiv:2107.14575.

    Example:
        >>> FixedBits(3).choose(BitLedger(), Step(squares=[1.0, 9.0], sizes=[10, 10], lr=0.1, share=1.0))
        [3, 3]

    Args:
        bits: bits per entry, 2 to 8.
    """

    bits: Annotated[int, Range(f"{LEAST}..{MOST}", "4 is usual")] = 4

    @property
    def least(self) -> int:
        """The bits of every step."""
        return self.bits

    @property
    def most(self) -> int:
        """The bits of every step."""
        return self.bits

    def choose(self, ledger: BitLedger, step: Step) -> list[int]:
        """Return the number of bits for each part of the gradient."""
        return [self.bits] * len(step.sizes)


@registered
class ErrorBound(_Rule):
    r"""Use the fewest bits with which quantization adds at most `error` to the bound on $F(x_T) - F^*$.

    Let $E_t$ be the error added before step $t$, which follows
    $E_{t+1} = \alpha_t E_t + \eta_t^2 L S_t / 8 n s_t^2$ (this form allows the learning rate to change). The rule
    assumes that the remaining steps are like this one. Each of them may add the same error $\lambda$, within the limits
    of `least` and `most` bits:

    $$\frac{a_t}{s_t^2} \approx \lambda, \qquad \sum_{k \ge t} \frac{a_k}{s_k^2} = \epsilon - \alpha_t^{T-t} E_t .$$

    Bits are rounded so that the error is as near to $\lambda$ as possible without exceeding the rest of the bound. The
    bound therefore holds if `most` bits suffice, and squares are at most `margin` larger than estimated. After `steps`
    steps the plan restarts.

    If squares shrink during the run, or each step removes much of the earlier errors ($\alpha_t$ well below 1), the
    plan reserves error for later steps that need less of it, and sends more than the fewest bits: at most four times
    as many, the ratio of `most` to `least`. Over 400 steps with $L = 1$ and the worst `error`, it sends 1.5 times as
    many bits for squares that fall by 1000 with $\mu = 0.05$ and $\eta = 0.5$; with $\mu = \eta = 0.5$ 2.4 times for
    constant squares and 3.5 times for squares that fall by 1000; and 3.7 times for squares that fall by $10^6$ with
    $\mu = 0.5$ and $\eta = 1$. `BitBudget` has no such cost.

    Example:
        >>> step = Step(squares=[1.0], sizes=[100], lr=0.1, share=1.0)
        >>> [ErrorBound(error, steps=100).choose(BitLedger(), step) for error in (1e-1, 1e-2, 1e-3)]
        [[2], [3], [5]]

    Args:
        error: $\epsilon$, in units of the loss; more sends fewer bits.
        steps: $T$, the steps of the run.
        smoothness: $L$; an overestimate sends more bits than necessary.
        strong_convexity: $\mu$; 0 weighs all steps equally, more sends fewer bits early and more at the end.
        final_lr: the lowest future learning rate of a decreasing schedule, with which early errors decay more slowly.
            None for a constant learning rate.
        margin: the relative amount by which squares may exceed their estimate; it only matters near the end of the run.
        least: the fewest bits per entry, at least 2.
        most: the most bits per entry, at most 8; the first step takes these.
    """

    error: Annotated[float, Range("(0, inf)", "1e-3 is usual")] = 1e-3
    steps: Steps = 1000
    smoothness: Annotated[float, Range("(0, inf)", "1.0 is usual")] = 1.0
    strong_convexity: Annotated[float, Range("[0, {smoothness}]", "0.0 weighs all steps alike")] = 0.0
    final_lr: Annotated[float | None, Range("[0, inf)", "None for a constant rate")] = None
    margin: Annotated[float, Range("[0, inf)", "0.5 is usual")] = 0.5
    least: Least = LEAST
    most: Most = MOST

    def choose(self, ledger: BitLedger, step: Step) -> list[int]:
        """Return the number of bits for each part of the gradient."""
        if isinf(step.square):
            return [self.most] * len(step.sizes)
        remaining = self.steps - ledger.step % self.steps
        rates = (step.lr, step.lr if self.final_lr is None else self.final_lr)
        alpha = max(contraction(lr, self.smoothness, self.strong_convexity) for lr in rates)
        # A new plan does not include the errors of the last one.
        error = ledger.error if remaining < self.steps else 0.0
        left = self.error - alpha**remaining * error
        now = self._weights(step)
        weights = [alpha ** (remaining - 1) * weight for weight in now]
        share, bound = _share(sum(now), alpha, remaining, left, (levels_of(self.least), levels_of(self.most)))
        # The squares are those of the previous step; this one's may be larger.
        bound /= 1 + self.margin
        return fewest_bits(weights, share, bound=bound, sizes=step.sizes, least=self.least, most=self.most)

    def settle(self, ledger: BitLedger, step: Step, bits: Sequence[int]) -> BitLedger:
        """Return the ledger after a step whose squares are known."""
        alpha = contraction(step.lr, self.smoothness, self.strong_convexity)
        carried = alpha * ledger.error if ledger.step % self.steps else 0.0
        return ledger.after(step.mean_bits(bits), carried + error_of(self._weights(step), bits), step.square)

    def _weights(self, step: Step) -> list[float]:
        factor = self.smoothness * step.lr**2 / 8 * step.share
        return [factor * square for square in step.squares]


@registered
class BitBudget(_Rule):
    r"""Use a mean number of bits per entry, with more bits for large gradients and, with `decay`, near the end.

    The error is smallest if $\log_2 s_t$ differs from its mean over the remaining steps by as much as
    $\tfrac12 \log_2 a_t$ differs from its own mean. With $R$ the bits left for each remaining step, $\ell$ a mean of
    recent $\tfrac12 \log_2 S$ and $\ell'$ its slope, which is assumed to last for as many steps as were observed and
    to change the result by at most two bits, a step gets

    $$R + \tfrac12 \log_2 S_t - \ell - \ell' - \tfrac12 \min(t, T-1-t)\,\ell' + \tfrac14 (T-1-t) \log_2 \alpha ,$$

    bits, divided among its parts so that the error is smallest. Unused bits of a step go to later steps, and `least`
    bits are reserved for each later step, so the budget is never exceeded. After `steps` steps the plan restarts.

    Example:
        >>> rule, small, large = BitBudget(bits=4.0, steps=100), 1.0, 64.0
        >>> ledger = BitLedger(step=50, bits=200.0, level=0.0)  # half of the run; squares were 1 so far
        >>> [rule.choose(ledger, Step([square], [100], lr=0.1, share=1.0)) for square in (small, large)]
        [[4], [7]]

    Args:
        bits: the mean bits per entry and step over the run, without scales.
        steps: $T$, the steps of the run.
        decay: $\alpha$ in (0, 1], the factor by which one step reduces earlier errors; 1 for non-convex functions.
        least: the fewest bits per entry, at least 2.
        most: the most bits per entry, at most 8.
    """

    bits: float = 4.0
    steps: Steps = 1000
    decay: Annotated[float, Range("(0, 1]", "Use 1 for non-convex functions")] = 1.0
    least: Least = LEAST
    most: Most = MOST

    def __post_init__(self) -> None:
        check_range("bits", self.bits, f"[{self.least}, {self.most}]", "4.0 is usual")

    def choose(self, ledger: BitLedger, step: Step) -> list[int]:
        """Return the number of bits for each part of the gradient."""
        remaining = self.steps - ledger.step % self.steps
        earlier_runs = ledger.step // self.steps
        bits_left = self.bits * self.steps * (earlier_runs + 1) - ledger.bits
        wanted = bits_left / remaining + self._above_mean(ledger, step.square, remaining)
        squares = step.sizes if isinf(step.square) else step.squares
        granted, entries = max(wanted, self.least), sum(step.sizes)
        # `best_bits` rounds down; with half a bit of the smallest part more, it rounds to nearest.
        granted = min(granted + min(step.sizes) / entries / 2, bits_left - self.least * (remaining - 1))
        budget = granted * entries * (1 + 1e-12)
        return best_bits(squares, budget, sizes=step.sizes, least=self.least, most=self.most)

    def _above_mean(self, ledger: BitLedger, square: float, remaining: int) -> float:
        """Return by how many bits a step should exceed the mean of the remaining steps."""
        if remaining == 1:
            return 0.0
        of_decay = (remaining - 1) / 4 * log2(self.decay)
        if isinf(square) and not ledger.step:
            return self.most
        if square <= 0 or isinf(square) or isnan(ledger.level):
            return of_decay
        # Corrected for the start of the exponential mean at zero.
        slope = ledger.slope / (1 - _SLOPE_DECAY**ledger.step)
        falling = -slope * min(remaining - 1, ledger.step) / 2
        return (
            log2(square) / 2 - ledger.level - slope + min(max(falling, -_MOST_SLOPE_BITS), _MOST_SLOPE_BITS) + of_decay
        )


Rule = FixedBits | ErrorBound | BitBudget


def _share(weight: float, alpha: float, remaining: int, left: float, levels: tuple[int, int]) -> tuple[float, float]:
    """Return the error that the current step should add, and the most that it may add.

    Args:
        weight: the weight of a step's error at this step; each later step multiplies it by `alpha`.
        alpha: the factor by which one step reduces earlier errors.
        remaining: the number of remaining steps, including the current one.
        left: the error that all of them may add.
        levels: the fewest and the most levels.
    """
    count = min(remaining, _POINTS)
    stride = (remaining - 1) / max(1, count - 1)
    weights = [weight * alpha ** (remaining - 1 - stride * i) for i in range(count)]
    most, least = ([w / s**2 for w in weights] for s in levels)
    target = left * count / remaining

    def added(share: float) -> float:
        return sum(min(max(share, low), high) for low, high in zip(least, most, strict=True))

    # Bisection for the equal share, with which the added error increases.
    low, high = 0.0, max(most)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if added(middle) <= target else (low, middle)
    return (high if added(high) <= target else low), left - sum(least[1:]) * (remaining - 1) / max(1, count - 1)


def skipped_step(ledger: BitLedger, step: Step, bits: Sequence[int]) -> BitLedger:
    """Return the ledger after a step with a non-finite gradient, whose bits are spent and which adds no error."""
    return ledger.after(step.mean_bits(bits), ledger.error, 0.0)
