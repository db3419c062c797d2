"""Who decides on the bits of every step: rules that hold to an error, or to a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from math import inf, isinf, isnan, log2, nan

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.strategies.gradients.bits import LEAST, MOST, best_bits, contraction, error_of, fewest_bits, levels_of
from thinwire.validation import check_kinds

_LEVEL, _SLOPE = 0.8, 0.95  # what smoothed logarithms and their slope keep of themselves at every step
_FARTHEST = 2.0  # bits that a slope may add or take: gradients do not fall for ever as they fall now
_POINTS = 64  # at which the rest of a run is looked at


@dataclass(frozen=True)
class BitLedger:
    """What has been spent, and what came of it.

    Args:
        step: steps that are settled.
        bits: that a worker has spent so far, for one entry of its gradients; scales are not counted.
        error: what quantisation has added by now to the bound on the loss.
        level: half the binary logarithm of recent squares, smoothed; NaN before the first.
        slope: by how much that rises at a step, smoothed too.
        answered: bits that means were sent back in so far, for one entry; what rules spend is not theirs.
    """

    step: int = 0
    bits: float = 0.0
    error: float = 0.0
    level: float = nan
    slope: float = 0.0
    answered: float = 0.0

    @staticmethod
    def read(numbers: Tensor) -> BitLedger:
        """From six numbers, as `written` gives them."""
        step, *rest = (float(number) for number in numbers.tolist())
        return BitLedger(int(step), *rest)

    def written(self) -> Tensor:
        """As six numbers in double precision."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    def after(self, bits: float, error: float, square: float) -> BitLedger:
        """One step later."""
        level, slope = self.level, self.slope
        if square > 0:
            now = log2(square) / 2
            known = now if isnan(level) else level
            level = _LEVEL * known + (1 - _LEVEL) * now
            slope = _SLOPE * slope + (1 - _SLOPE) * (level - known)
        return BitLedger(self.step + 1, self.bits + bits, error, level, slope, self.answered)

    def with_answer(self, bits: float) -> BitLedger:
        """With what the mean of the last step was sent back in."""
        return replace(self, answered=self.answered + bits)


@dataclass(frozen=True)
class Step:
    """What a rule may know of a step.

    Args:
        squares: one worker's, of each part of the gradient: this step's, or as near to them as is known; infinite where
            nothing is known.
        sizes: entries of each part.
        lr: the learning rate.
        share: the mean square error over that of one worker's code, and over a quarter of a level's square.
    """

    squares: Sequence[float]
    sizes: Sequence[int]
    lr: float
    share: float

    @property
    def square(self) -> float:
        """Of the whole gradient."""
        return sum(self.squares)

    def mean_bits(self, bits: Sequence[int]) -> float:
        """For one entry, over all parts."""
        return sum(b * size for b, size in zip(bits, self.sizes, strict=True)) / max(1, sum(self.sizes))


@dataclass(frozen=True)
class FixedBits:
    """The same bits at every step.

    Args:
        bits: of each entry, 2 to 8.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        """Check the kind and the range."""
        check_kinds(self)
        _check_range(self.bits, self.bits)

    @property
    def most(self) -> int:
        """The same."""
        return self.bits

    def choose(self, ledger: BitLedger, step: Step) -> list[int]:
        """The bits of each part of the gradient."""
        return [self.bits] * len(step.sizes)

    def settle(self, ledger: BitLedger, step: Step, bits: Sequence[int]) -> BitLedger:
        """The ledger once what a step was like is known."""
        return ledger.after(step.mean_bits(bits), 0.0, step.square)


@dataclass(frozen=True)
class ErrorBound:
    r"""The fewest bits that keep what quantisation adds to the bound on $F(x_T) - F^*$ within `error`.

    With $E_t$ what has been added by step $t$, carried along by $E_{t+1} = \alpha_t E_t + \eta_t^2 L S_t / 8 n s_t^2$
    (the product form of rates that change), and the remaining steps taken to be like this one, each of them that
    neither `least` nor `most` bits limit may add an equal share $\lambda$ of what is left,

    $$\frac{a_t}{s_t^2} \approx \lambda, \qquad \sum_{k \ge t} \frac{a_k}{s_k^2} = \epsilon - \alpha_t^{T-t} E_t .$$

    Whole bits come as near to $\lambda$ as they can, and never take more than is left. So the bound is kept wherever
    `most` bits can, and squares turn out no more than `margin` larger than was known. More than `steps` steps begin
    anew.

    Args:
        error: $\epsilon$, in units of the loss; more says less.
        steps: $T$, of the run.
        smoothness: $L$; taken too large, more is said than need be.
        strong_convexity: $\mu$; 0 lets every step count alike, more says less at first and more at the end.
        final_lr: the least learning rate to come, where it falls: errors then outlive more steps, and less may be added
            early. None for a constant one.
        margin: by how much squares may turn out larger than was known, without which a whole bit too few could end the
            run above its bound; only matters near the end.
        least: bits of each entry at least, from 2.
        most: bits of each entry at most, to 8; what the first step has.
    """

    error: float = 1e-3
    steps: int = 1000
    smoothness: float = 1.0
    strong_convexity: float = 0.0
    final_lr: float | None = None
    margin: float = 0.5
    least: int = LEAST
    most: int = MOST

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        _check_range(self.least, self.most)
        _check_steps(self.steps)
        if self.final_lr is not None and not 0 <= self.final_lr < inf:
            raise ConfigError(f"final_lr={self.final_lr}: must be finite and not negative; None for a constant rate")
        if not 0 <= self.margin < inf:
            raise ConfigError(f"margin={self.margin}: must be finite and not negative; 0.5 is usual")
        if not 0 < self.error < inf:
            raise ConfigError(f"error={self.error}: must be positive and finite, in units of the loss; 1e-3 is usual")
        if not 0 < self.smoothness < inf or not 0 <= self.strong_convexity <= self.smoothness:
            raise ConfigError(
                f"smoothness={self.smoothness}, strong_convexity={self.strong_convexity}: the first must be positive "
                "and finite, the second lie between 0 and it; 1.0 and 0.0 weigh all steps alike"
            )

    def choose(self, ledger: BitLedger, step: Step) -> list[int]:
        """The bits of each part of the gradient."""
        if isinf(step.square):
            return [self.most] * len(step.sizes)
        remaining = self.steps - ledger.step % self.steps
        rates = (step.lr, step.lr if self.final_lr is None else self.final_lr)
        alpha = max(contraction(lr, self.smoothness, self.strong_convexity) for lr in rates)
        error = ledger.error if remaining < self.steps else 0.0
        left = self.error - alpha**remaining * error
        weights = [alpha ** (remaining - 1) * weight for weight in self._weights(step)]
        share, bound = _share(sum(weights), alpha, remaining, left, (levels_of(self.least), levels_of(self.most)))
        bound /= 1 + self.margin
        return fewest_bits(weights, share, bound=bound, sizes=step.sizes, least=self.least, most=self.most)

    def settle(self, ledger: BitLedger, step: Step, bits: Sequence[int]) -> BitLedger:
        """The ledger once what a step was like is known."""
        alpha = contraction(step.lr, self.smoothness, self.strong_convexity)
        carried = alpha * ledger.error if ledger.step % self.steps else 0.0
        return ledger.after(step.mean_bits(bits), carried + error_of(self._weights(step), bits), step.square)

    def _weights(self, step: Step) -> list[float]:
        factor = self.smoothness * step.lr**2 / 8 * step.share
        return [factor * square for square in step.squares]


@dataclass(frozen=True)
class BitBudget:
    r"""So many bits an entry on average, more of them where gradients are large and, with `decay`, towards the end.

    The least error has $\log_2 s_t$ differ from its mean over the remaining steps as $\tfrac12 \log_2 a_t$ does from
    its own. With $R$ the bits left for each of these, $\ell$ a mean of recent $\tfrac12 \log_2 S$ and $\ell'$ its
    slope, which is taken to go on for as long as it was seen and to lead no further than two bits, a step so gets

    $$R + \tfrac12 \log_2 S_t - \ell - \ell' - \tfrac12 \min(t, T-1-t)\,\ell' + \tfrac14 (T-1-t) \log_2 \alpha ,$$

    and its parts share them so that the error is least. What a step leaves over is left to later ones, and no step
    takes what later ones need at least: never is more spent than there was. More than `steps` steps begin anew.

    Args:
        bits: an entry and step, on average over the run; scales are not counted.
        steps: $T$, of the run.
        decay: $\alpha$, what a step leaves of errors before it, in (0, 1]; 1 is for functions that are not convex.
        least: bits of each entry at least, from 2.
        most: bits of each entry at most, to 8.
    """

    bits: float = 4.0
    steps: int = 1000
    decay: float = 1.0
    least: int = LEAST
    most: int = MOST

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        _check_range(self.least, self.most)
        _check_steps(self.steps)
        if not self.least <= self.bits <= self.most:
            raise ConfigError(f"bits={self.bits}: must lie between least={self.least} and most={self.most}")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay={self.decay}: must lie in (0, 1]; 1 is for functions that are not convex")

    def choose(self, ledger: BitLedger, step: Step) -> list[int]:
        """The bits of each part of the gradient."""
        left = self.steps - ledger.step % self.steps
        rounds = ledger.step // self.steps
        purse = self.bits * self.steps * (rounds + 1) - ledger.bits
        wanted = purse / left + self._lead(ledger, step.square, left)
        squares = step.sizes if isinf(step.square) else step.squares
        given, entries = max(wanted, self.least), sum(step.sizes)
        # Whole bits are cut off what is wanted; half of one more is the nearest.
        given = min(given + min(step.sizes) / entries / 2, purse - self.least * (left - 1))
        budget = given * entries * (1 + 1e-12)
        return best_bits(squares, budget, sizes=step.sizes, least=self.least, most=self.most)

    def settle(self, ledger: BitLedger, step: Step, bits: Sequence[int]) -> BitLedger:
        """The ledger once what a step was like is known."""
        return ledger.after(step.mean_bits(bits), 0.0, step.square)

    def _lead(self, ledger: BitLedger, square: float, left: int) -> float:
        """Bits that a step should have more than the mean of the remaining ones."""
        if left == 1:
            return 0.0
        late = (left - 1) / 4 * log2(self.decay)
        if isinf(square) and not ledger.step:
            return self.most
        if square <= 0 or isinf(square) or isnan(ledger.level):
            return late
        slope = ledger.slope / (1 - _SLOPE**ledger.step)
        falling = -slope * min(left - 1, ledger.step) / 2
        return log2(square) / 2 - ledger.level - slope + min(max(falling, -_FARTHEST), _FARTHEST) + late


Rule = FixedBits | ErrorBound | BitBudget


def _share(weight: float, alpha: float, remaining: int, left: float, levels: tuple[int, int]) -> tuple[float, float]:
    """What the present one of the remaining steps should add to the error, and what it may.

    Args:
        weight: of the present step; a step later it is `1 / alpha` times that.
        alpha: what a step leaves of the errors before it.
        remaining: steps, the present one among them.
        left: what all of them may add.
        levels: the fewest and the most.
    """
    count = min(remaining, _POINTS)
    stride = (remaining - 1) / max(1, count - 1)
    weights = [weight / alpha ** (stride * i) for i in range(count)]
    most, least = ([w / s**2 for w in weights] for s in levels)
    target = left * count / remaining

    def added(share: float) -> float:
        return sum(min(max(share, low), high) for low, high in zip(least, most, strict=True))

    low, high = 0.0, max(most)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if added(middle) <= target else (low, middle)
    return (high if added(high) <= target else low), left - sum(least[1:]) * (remaining - 1) / max(1, count - 1)


def passed_over(ledger: BitLedger, step: Step, bits: Sequence[int]) -> BitLedger:
    """The ledger after a step that told nothing, as its gradient was not finite: bits are spent, no error is made."""
    return ledger.after(step.mean_bits(bits), ledger.error, 0.0)


def _check_range(least: int, most: int) -> None:
    if not LEAST <= least <= most <= MOST:
        raise ConfigError(f"least={least}, most={most}: bits must lie in {LEAST}..{MOST}, the least first")


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ConfigError(f"steps={steps}: a run has at least 1 step; say how many optimizer steps it takes")
