# SPDX-License-Identifier: Apache-2.0
"""LAMB: Adam's direction, with a step in proportion to each tensor's norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.kernels import adaptive
from thinwire.core.torch_internals import foreach
from thinwire.core.validation import check_range
from thinwire.errors import ConfigError
from thinwire.methods.optimizers.base import (
    ClosureOptimizer,
    cache_batches,
    exact_parameters,
    restore_dtypes,
    round_to_parameters,
    zero_moments,
)


class Lamb(ClosureOptimizer):
    r"""Move every tensor along Adam's direction by a step in proportion to the tensor's norm.

    With $g$ the gradient of one tensor $x$,

    $$m \leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \qquad
      u = \frac{m}{\sqrt v + \epsilon} + \lambda x,$$

    $$x \leftarrow x - \gamma\, c\, u, \qquad c = \min(\max(|x|/|u|, c_{min}), c_{max}),$$

    where $c = 1$ if either norm is zero. With `bias_correction`, $m$ and $v$ in $u$ are divided by
    $1-\beta^t$, as in the paper; without it this is the warm-up of `OneBitLamb`, bit for bit.

    State: `momentum` and `variance`, each like the parameters, in fp32 at least; for parameters in 16 bits a `master`
    copy in fp32, which the steps update. Each group counts its steps (`step`).

    You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes, ICLR 2020, arXiv:1904.00962,
    Algorithm 2.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))  # a norm of 5
        >>> optimizer = Lamb([x], lr=0.1)
        >>> x.grad = torch.tensor([1e-3, 1e-3])
        >>> optimizer.step()
        >>> round(float((x.detach() - torch.tensor([3.0, 4.0])).norm()), 4)  # lr times the norm, whatever the gradient
        0.5

    Args:
        params: the parameters.
        lr: $\gamma$; a step of 1 would move a tensor by its own norm.
        betas: $\beta_1$ and $\beta_2$, each in [0, 1); a larger value averages over more steps.
        eps: $\epsilon$; a larger value shortens the steps of entries with small gradients.
        weight_decay: $\lambda$, a pull toward zero that is part of the direction $u$.
        least_trust: $c_{min}$.
        most_trust: $c_{max}$; a smaller value limits tensors with large norms and small updates.
        bias_correction: whether moments are corrected for their start at zero.

    Raises:
        ConfigError: a value is out of its range.
    """

    # The trust ratio of a tensor needs the norm of the whole tensor.
    needs_whole_tensors = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        least_trust: float = 0.01,
        most_trust: float = 10.0,
        bias_correction: bool = True,
    ) -> None:
        check_adaptive(lr, betas, eps, weight_decay)
        check_trust(least_trust, most_trust)
        settings = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "least_trust": least_trust}
        super().__init__(
            params, {"lr": lr, **settings, "most_trust": most_trust, "bias_correction": bias_correction, "step": 0}
        )

    def update(self) -> None:
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None and p.numel()]
            # A step with a dropped gradient leaves the moments and their correction unchanged.
            if moved:
                group["step"] += 1
            for parameter in moved:
                if not self.state[parameter]:
                    self.state[parameter].update(zero_moments(parameter))
            for batch in cache_batches(moved):
                self._move(group, batch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict()` of an equal optimizer; every tensor keeps its dtype."""
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict)

    def _move(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        exact = exact_parameters(parameters, states)
        momenta, variances = ([state[name] for state in states] for name in ("momentum", "variance"))
        gradients = [p.grad.to(m.dtype) for p, m in zip(parameters, momenta, strict=True) if p.grad is not None]
        update_moments_(group, momenta, variances, gradients)
        directions = directions_of(group, momenta, variances, corrected=group["bias_correction"])
        add_decay_(group, directions, exact)
        descend_(group, exact, directions, self._ratios(group, parameters, exact, directions))
        round_to_parameters(exact, parameters)

    def _ratios(
        self, group: dict[str, Any], parameters: Sequence[Tensor], exact: list[Tensor], directions: list[Tensor]
    ) -> Tensor:
        """Return the trust ratio of each tensor; `exact` holds the values of `parameters`."""
        return trust_ratios(group, exact, directions)[0]


# -- the arithmetic, on lists of tensors -------------------------------------------------------------------------------


def update_moments_(
    group: dict[str, Any], momenta: list[Tensor], variances: list[Tensor], gradients: list[Tensor]
) -> None:
    """Update both moments with a gradient."""
    beta1, beta2 = group["betas"]
    foreach.lerp_(momenta, gradients, 1 - beta1)
    foreach.mul_(variances, beta2)
    foreach.addcmul_(variances, gradients, gradients, value=1 - beta2)


def denominators_of(group: dict[str, Any], variances: list[Tensor]) -> list[Tensor]:
    """Return the denominators of Adam's direction: the root of the variance, plus epsilon."""
    roots = foreach.sqrt(variances)
    foreach.add_(roots, group["eps"])
    return list(roots)


def directions_of(
    group: dict[str, Any], momenta: list[Tensor], variances: list[Tensor], *, corrected: bool = False
) -> list[Tensor]:
    """Return Adam's direction of every tensor, without weight decay."""
    if not corrected:
        return list(foreach.div(momenta, denominators_of(group, variances)))
    # The division by 1 - beta^t corrects for the start of both moments at zero.
    first, second = (1 - beta ** group["step"] for beta in group["betas"])
    means = foreach.div(momenta, first)
    squares = foreach.div(variances, second)
    return list(foreach.div(means, denominators_of(group, list(squares))))


def add_decay_(group: dict[str, Any], directions: list[Tensor], parameters: list[Tensor]) -> None:
    """Add weight decay."""
    if group["weight_decay"]:
        foreach.add_(directions, parameters, alpha=group["weight_decay"])


def norms_of(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor, as one vector."""
    return torch.stack(foreach.norm(tensors))


def trust_ratios(group: dict[str, Any], parameters: list[Tensor], directions: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the trust ratio of each tensor, and whether both of its norms are positive; two vectors."""
    sizes, lengths = norms_of(parameters), norms_of(directions)
    known = (sizes > 0) & (lengths > 0)
    bounded = (sizes / lengths).clamp(group["least_trust"], group["most_trust"])
    # A norm of zero gives zero, infinity or NaN: such tensors take Adam's step instead.
    return torch.where(known, bounded, torch.ones_like(bounded)), known


def descend_(group: dict[str, Any], parameters: list[Tensor], directions: list[Tensor], ratios: Tensor) -> None:
    """Take the step; the directions are overwritten."""
    adaptive.scaled_step_(parameters, directions, ratios, rate=float(group["lr"]))


# -- checks of hyperparameters -----------------------------------------------------------------------------------------


def check_adaptive(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Check the hyperparameters of Adam-like methods.

    Raises:
        ConfigError: a value is invalid.
    """
    check_range("lr", lr, "[0, inf)", "0.001 is usual")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas={betas}: must be two numbers in [0, 1). (0.9, 0.999) is usual")
    check_range("eps", eps, "(0, inf)", "1e-8 is usual")
    check_range("weight_decay", weight_decay, "[0, inf)", "0.01 is usual")


def check_trust(least_trust: float, most_trust: float) -> None:
    """Check the bounds of the trust ratio.

    Raises:
        ConfigError: a bound is invalid.
    """
    if not 0 < least_trust <= most_trust < inf:
        raise ConfigError(
            f"least_trust={least_trust}, most_trust={most_trust}: must be positive, finite and in this order. "
            "0.01 and 10 are usual"
        )
