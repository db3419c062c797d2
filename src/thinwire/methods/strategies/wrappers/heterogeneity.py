# SPDX-License-Identifier: Apache-2.0
r"""Estimate the dissimilarity and noise of workers' gradients, and recommend a method for them.

With $F=\frac1n\sum_i F_i$ the mean of the workers' own losses and $g_i$ an unbiased gradient of $F_i$,

- dissimilarity: $\zeta^2 = \frac1n\sum_i |\nabla F_i - \nabla F|^2$,
- noise: $\sigma^2 = \frac1n\sum_i E|g_i - \nabla F_i|^2$,
- gradient: $|\nabla F|^2$.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Literal

import torch
from torch import Tensor

from thinwire.errors import ConfigError

NAMES = ("gradient_dissimilarity", "gradient_noise", "gradient_square")
# Below the first ratio of inner to outer rate, minibatch SGD does as well; above the second, Local SGD does.
_MINIBATCH_BELOW, _LOCAL_ABOVE = 0.1, 0.9
# The recommended period is at most this many times the planned one: the figures are of one point in training.
_MOST_PERIODS = 4


def estimate(sums: Tensor, mean_square: Tensor, workers: int, steps: Tensor | float = 1) -> Tensor:
    r"""Estimate dissimilarity, noise and gradient from each worker's deviations from the mean at two successive steps.

    With $e_i = g_i - \bar g$ and $e_i'$ the same a step before, noises of different steps are independent, so that
    $\frac1n\sum\langle e_i, e_i'\rangle$ has the mean $\zeta^2$; $\frac1n\sum|e_i|^2$ has the mean
    $\zeta^2 + (1-\frac1n)\,\sigma^2$, and $|\bar g|^2$ the mean $|\nabla F|^2 + \sigma^2/n$. All three estimates are
    unbiased, so small ones may be negative.

    Args:
        sums: [3], the sums over workers of $|e_i|^2$, of $|e_i'|^2$ and of $\langle e_i, e_i'\rangle$.
        mean_square: $|\bar g|^2$.
        workers: $n$, at least 2.
        steps: the number of gradients of which each $g_i$ is the mean; the returned noise is that of one gradient.

    Returns:
        [3], the squares of dissimilarity, noise and gradient, in the order of `NAMES`.
    """
    now, before, both = (sums / workers).unbind()
    noise = ((now + before) / 2 - both) * workers / (workers - 1)
    return torch.stack([both, noise * steps, mean_square - noise / workers])


@dataclass(frozen=True)
class Recommendation:
    """A recommended strategy, and the reason.

    Attributes:
        method: its name.
        recipe: the strategy as text, for `parse`; tune its learning rate again.
        period: steps in a round.
        inner: the ratio of the inner learning rate to the outer one: 0 is minibatch SGD, 1 is Local SGD.
        reason: a sentence with the decisive figures.
    """

    method: Literal["minibatch", "inner/outer", "local"]
    recipe: str
    period: int
    inner: float
    reason: str


def recommend(metrics: Mapping[str, float], *, workers: int, period: int = 8) -> Recommendation:
    r"""Recommend minibatch SGD, Local SGD or a method between them, from the figures of `Probe`.

    This is a rule of thumb. In a round of $K$ local steps a worker drifts by $\zeta K$ along its own part of the
    gradient, while all workers together move by $|\nabla F| K$: inner steps of $\min(1, |\nabla F|/\zeta)$ keep the
    drift below the common movement. If $\sigma^2 / (nK)$ exceeds $|\nabla F|^2$, even the mean of all gradients of a
    round is mostly noise. Minibatch SGD, which does not drift, is then as fast. The recommended period is at most
    $|\nabla F|/\zeta$ for local steps and $\sigma^2 / (n|\nabla F|^2)$ for minibatch SGD.

    Near the optimum $|\nabla F|$ vanishes, but $\zeta$ does not: measure again later in training.

    Args:
        metrics: the probe's figures, as `Worker.metrics` returns them; means over several steps are better.
        workers: the number of workers.
        period: the planned round, in steps; the recommended one is at most four times as long.

    Raises:
        ConfigError: a figure is missing or not finite, or there is only one worker.

    Example:
        >>> figures = {"gradient_dissimilarity": 4.0, "gradient_noise": 8.0, "gradient_square": 1.0}
        >>> recommend(figures, workers=4).recipe
        'MinibatchLocalSGD(period=8, inner=0.5)'
        >>> recommend({**figures, "gradient_dissimilarity": 0.01}, workers=4).recipe
        'LocalSGD(period=10)'
    """
    missing = [name for name in NAMES if not isfinite(metrics.get(name, inf))]
    if missing:
        raise ConfigError(f"{missing[0]}={metrics.get(missing[0])}: must be finite. Train some steps under Probe")
    # Unbiased estimates of small squares may be negative.
    dissimilarity, noise, gradient = (max(0.0, float(metrics[name])) for name in NAMES)
    if workers < 2 or period < 1:
        raise ConfigError(f"workers={workers}, period={period}: must be at least 2 workers, and 1 step per round")
    noisy = noise / (workers * period) >= gradient
    # |grad F| / zeta bounds both the length of local steps and their number in a round.
    steps = sqrt(gradient / dissimilarity) if dissimilarity else inf
    inner = 0.0 if noisy else min(1.0, steps)
    longest = _MOST_PERIODS * period
    apart = f"gradients differ by {sqrt(dissimilarity):.3g} between workers"
    common = f"their common part is {sqrt(gradient):.3g}"
    if inner <= _MINIBATCH_BELOW:
        length = max(1, int(min(noise / workers / gradient if gradient else inf, longest)))
        left = sqrt(noise / (workers * period))
        reason = (
            f"the noise of the mean of a round's gradients is {left:.3g}, and {common}: minibatch SGD loses nothing "
            "and does not drift"
            if noisy
            else f"{apart}, and {common}: local steps would drift. Take few long steps, which AC-SA speeds up"
        )
        return Recommendation("minibatch", f"MinibatchLocalSGD(period={length}, inner=0.0)", length, 0.0, reason)
    length = max(1, int(min(steps, longest)))
    if inner >= _LOCAL_ABOVE:
        reason = f"{apart}, and {common}: in about {length} local steps the common part is larger than the drift"
        return Recommendation("local", f"LocalSGD(period={length})", length, 1.0, reason)
    inner = float(f"{inner:.2g}")
    reason = f"{apart}, and {common}: local steps scaled by {inner:g} keep the drift smaller than that"
    return Recommendation("inner/outer", f"MinibatchLocalSGD(period={period}, inner={inner})", period, inner, reason)
