# SPDX-License-Identifier: Apache-2.0
"""AC-SA: accelerated stochastic approximation, for few rounds of large batches."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from math import ceil, inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.replica.flat import copy_each_, restored
from thinwire.core.torch_internals import foreach
from thinwire.core.validation import check_range
from thinwire.errors import ConfigError
from thinwire.methods.optimizers.base import ClosureOptimizer


class AcSA(ClosureOptimizer):
    r"""Take growing gradient steps, and return a weighted average of the iterates.

    With $x = \bar x$ the initial parameters, for $t = 1, 2, ...$ and $a_t = 2/(t+1)$,

    $$\hat x = (1-a_t)\,\bar x + a_t x, \qquad x \leftarrow x - \gamma t\, g(\hat x), \qquad
      \bar x \leftarrow (1-a_t)\,\bar x + a_t x .$$

    The model's parameters are $\hat x$ during training; the result is $\bar x$. Inside `evaluating()` the parameters
    are $\bar x$; `Worker.consensus` enters it automatically. On convex functions with $L$-Lipschitz gradients,
    $\gamma \le 1/(2L)$ and gradients without noise, after $R$ steps

    $$F(\bar x) - F^* \le \frac{2\,|x_1 - x^*|^2}{\gamma R (R+1)},$$

    where gradient descent has $R$ instead of $R^2$. Growing steps accumulate noise: if it dominates, $\gamma$ should
    fall with the number of steps as $R^{-3/2}$.

    With `strong_convexity` $\mu$ the method restarts from $\bar x$ every $\lceil\sqrt{8/(\gamma\mu)}\rceil$ steps.
    Without noise each stage at least halves $F - F^*$. `restart_every` sets the length of a stage directly.

    Accelerated minibatch SGD is this method with gradients averaged over workers and over the round: `AllReduce()`, and
    all but the last backward pass of a round under `no_sync()`. Each step computes the parameters from the optimizer
    state, so `attach` refuses strategies that move parameters.

    State: `iterate` ($x$), `aggregate` ($\bar x$), each like the parameters, and `step` ($t$, within the stage).

    Lan, An optimal method for stochastic composite optimization, Mathematical Programming 133, 2012; stages: Ghadimi
    and Lan, Optimal Stochastic Approximation Algorithms for Strongly Convex Stochastic Composite Optimization II, SIAM
    J. Optim. 23, 2013. Its use in rounds: Woodworth, Patel and Srebro, NeurIPS 2020, arXiv:2006.04735.

    Example:
        >>> x = nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = AcSA([x], lr=0.5)
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     (x.square().sum() / 2).backward()
        ...     optimizer.step()
        >>> with optimizer.evaluating():
        ...     bool(x.square().sum() / 2 <= 2 / (0.5 * 10 * 11))  # the bound above
        True

    Args:
        params: the parameters.
        lr: $\gamma$, at most $1/(2L)$; you may schedule it. A larger value is faster until it diverges.
        strong_convexity: $\mu$; 0 for merely convex functions. If it is too large, stages are too short, and
            convergence is that of gradient descent.
        restart_every: steps of a stage, instead of those that follow from `strong_convexity`.
        weight_decay: adds this times $\hat x$ to the gradient.

    Raises:
        ConfigError: a value is out of its range.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        *,
        strong_convexity: float = 0.0,
        restart_every: int | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        check_range("lr", lr, "(0, inf)", "Up to 1/(2L) convergence is guaranteed")
        check_range("strong_convexity", strong_convexity, "[0, inf)", "0 is for functions that are merely convex")
        check_range("weight_decay", weight_decay, "[0, inf)", "0 is usual")
        check_range("restart_every", restart_every, "1..", "None never restarts")
        if restart_every is not None and strong_convexity:
            raise ConfigError(
                f"restart_every={restart_every}, strong_convexity={strong_convexity}: both set the length of a stage. "
                "Give only one of them"
            )
        settings = {"strong_convexity": strong_convexity, "restart_every": restart_every, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **settings})

    def update(self) -> None:
        """Move every group in which some parameter has a gradient; missing gradients count as zero."""
        # All parameters of a group share one t, so none of them may skip a step.
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.requires_grad]
            if any(p.grad is not None for p in trained):
                self._move(group, trained)

    def _move(self, group: dict[str, Any], trained: Sequence[Tensor]) -> None:
        for parameter in trained:
            state = self.state[parameter]
            # At the first step all three sequences start at the initial parameters.
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                state["iterate"] = parameter.clone()
                state["aggregate"] = parameter.clone()
        iterates, aggregates = ([self.state[p][name] for p in trained] for name in ("iterate", "aggregate"))
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        if group["weight_decay"]:
            gradients = foreach.add(gradients, trained, alpha=group["weight_decay"])
        lr = float(group["lr"])
        t = int(self.state[trained[0]]["step"]) + 1
        foreach.add_(iterates, gradients, alpha=-lr * t)
        foreach.lerp_(aggregates, iterates, 2 / (t + 1))
        if t >= _stage_steps(group, lr):
            copy_each_(iterates, aggregates)
            t = 0
        # The next gradient is evaluated at a point between the two, so the model moves there.
        copy_each_(list(trained), aggregates)
        foreach.lerp_(list(trained), iterates, 2 / (t + 2))
        for parameter in trained:
            self.state[parameter]["step"].fill_(t)

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Swap in the resulting parameters for evaluation and export, and restore the iterate afterwards."""
        held = [p for group in self.param_groups for p in group["params"] if "aggregate" in self.state.get(p, {})]
        with restored(held):
            with torch.no_grad():
                for parameter in held:
                    parameter.copy_(self.state[parameter]["aggregate"])
            yield


def _stage_steps(group: dict[str, Any], lr: float) -> float:
    """Return the steps until the method restarts; infinite if it never does."""
    if group["restart_every"] is not None:
        return int(group["restart_every"])
    strength = lr * group["strong_convexity"]
    return ceil(sqrt(8 / strength)) if strength else inf
