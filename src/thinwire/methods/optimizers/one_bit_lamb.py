# SPDX-License-Identifier: Apache-2.0
"""1-bit LAMB: LAMB whose second stage only needs the mean momentum of all workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.kernels.adaptive import lamb_direction_
from thinwire.core.replica.flat import copy_each_
from thinwire.core.validation import check_range
from thinwire.errors import ConfigError
from thinwire.methods.optimizers.freezing import FreezingOptimizer, Group, States
from thinwire.methods.optimizers.lamb import (
    add_decay_,
    check_adaptive,
    check_trust,
    descend_,
    directions_of,
    trust_ratios,
    update_moments_,
)


class OneBitLamb(FreezingOptimizer):
    r"""Run LAMB until `freeze()`, then use a constant variance and trust ratios from the momentum.

    Until `freeze()` this is `Lamb(bias_correction=False)`, bit for bit, which also keeps an exponential moving average
    of each tensor's trust ratio $c$, $\bar c \leftarrow \beta_3 \bar c + (1-\beta_3) c$. After `freeze()` the variance
    $v$ and $\bar c$ are constant. With $m$ the new momentum, $m'$ the previous one and $x$ the parameters of a tensor,
    $\tilde g$ is the gradient that would change $m'$ into $m$, and $\tilde v$ a variance that is updated with it,

    $$\tilde g = \frac{m - \beta_1 m'}{1-\beta_1}, \qquad \tilde v \leftarrow \beta_2 \tilde v + (1-\beta_2)\tilde g^2,
      \qquad r = \max_i \frac{\sqrt{v_i}+\epsilon}{\sqrt{\tilde v_i}+\epsilon},$$

    $$u_0 = \frac{m}{\sqrt v + \epsilon}, \qquad u = u_0 + \lambda x, \qquad \rho = \min(1, |u_0|/|u|), \qquad
      r \leftarrow \rho r + 1 - \rho,$$

    where $r$ is clamped to $[r_{min}, r_{max}]$, and then to a relative change of at most $\tau$ per step. The step is
    $x \leftarrow x - \gamma\, r \bar c\, u$. Under `CompressedMomentum()` $m$ is the mean over workers; otherwise this
    worker's gradient updates it.

    The start of $\bar c$ at zero is corrected at `freeze()`, as Adam corrects its bias. In steps where a tensor's
    parameters or direction have norm zero, $\bar c$ does not change.

    State: `momentum`, `variance` and, after `freeze()`, `fresh` ($\tilde v$), each like the parameters, in fp32 at
    least; per tensor `trust` ($\bar c$), `trust_weight` (the sum of its weights), `factor` ($r$) and `coefficient`
    (which scales the momenta of all tensors to one magnitude before compression); for parameters in 16 bits `master`,
    their copy in fp32.

    Li et al., 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed,
    HiPC 2022, arXiv:2104.06069, Algorithm 1.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = OneBitLamb([x], lr=0.1)
        >>> for step in range(3):
        ...     x.grad = torch.tensor([1.0, 1.0])
        ...     optimizer.step()
        >>> optimizer.freeze()
        >>> sorted(optimizer.state[x])
        ['coefficient', 'factor', 'fresh', 'momentum', 'trust', 'trust_weight', 'variance']

    Args:
        params: the parameters.
        lr: $\gamma$.
        betas: $\beta_1$ and $\beta_2$, each in [0, 1); a larger value averages over more steps.
        eps: $\epsilon$.
        weight_decay: $\lambda$.
        least_trust: $c_{min}$, the lower bound of $c$ before `freeze()`.
        most_trust: $c_{max}$, the upper bound of $c$ before `freeze()`.
        trust_beta: $\beta_3$; a larger value makes $\bar c$ a mean over more steps.
        least_factor: $r_{min}$, the lower bound of $r$.
        most_factor: $r_{max}$, the upper bound of $r$; a larger value allows longer steps where gradients have shrunk.
        factor_change: $\tau$, the largest relative change of $r$ in one step.

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
        trust_beta: float = 0.9,
        least_factor: float = 0.5,
        most_factor: float = 4.0,
        factor_change: float = 0.1,
    ) -> None:
        check_adaptive(lr, betas, eps, weight_decay)
        check_trust(least_trust, most_trust)
        check_range("trust_beta", trust_beta, "[0, 1)", "0.9 is usual")
        check_range("factor_change", factor_change, "(0, 1)", "0.1 is usual")
        if not 0 < least_factor <= 1 <= most_factor:
            raise ConfigError(
                f"least_factor={least_factor}, most_factor={most_factor}: must be positive, the first at most 1 "
                "and the second at least 1. 0.5 and 4 are usual"
            )
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "least_trust": least_trust}
        more = {"most_trust": most_trust, "trust_beta": trust_beta, "least_factor": least_factor}
        super().__init__(params, {**settings, **more, "most_factor": most_factor, "factor_change": factor_change})

    def on_init_state(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Add the moving average of trust ratios and the sum of its weights, both zero."""
        for name in ("trust", "trust_weight"):
            state[name] = torch.zeros((), dtype=state["momentum"].dtype, device=parameter.device)

    def on_freeze(self, groups: Sequence[tuple[Group, list[dict[str, Tensor]]]]) -> None:
        """Set `fresh` to the frozen variance and `factor` to 1, and compute `trust` and `coefficient`."""
        states = [state for _, members in groups for state in members]
        for state in states:
            state["fresh"] = state["variance"].clone()
            state["factor"] = torch.ones_like(state["trust"])
            known = state["trust_weight"] > 0
            state["trust"] = torch.where(known, state["trust"] / state["trust_weight"], state["factor"])
            state["coefficient"] = torch.ones_like(state["trust"])
        # A tensor without elements has no size: its 0/0 would make the mean, and so every coefficient, NaN.
        sized = [state for state in states if state["momentum"].numel()]
        if not sized:
            return
        sizes = [torch.linalg.vector_norm(state["momentum"]) / state["momentum"].numel() ** 0.5 for state in sized]
        # A tensor without momentum keeps coefficient 1; dividing by its size would give infinity.
        mean = torch.stack([size.to(sizes[0]) for size in sizes]).mean()
        for state, size in zip(sized, sizes, strict=True):
            state["coefficient"] = torch.where(size > 0, mean.to(size) / size, torch.ones_like(size))

    def warm_step(self, group: Group, parameters: list[Tensor], gradients: list[Tensor], states: States) -> None:
        """Take a LAMB step, and update the moving average of its trust ratios."""
        momenta, variances = ([state[name] for state in states] for name in ("momentum", "variance"))
        update_moments_(group, momenta, variances, gradients)
        directions = directions_of(group, momenta, variances)
        add_decay_(group, directions, parameters)
        ratios, known = trust_ratios(group, parameters, directions)
        descend_(group, parameters, directions, ratios)
        for name, values in (("trust", ratios), ("trust_weight", torch.ones_like(ratios))):
            before = torch.stack([state[name] for state in states])
            mean = torch.where(known, torch.lerp(before, values, 1 - group["trust_beta"]), before)
            copy_each_([state[name] for state in states], list(mean.unbind()))

    def frozen_step(self, group: Group, parameters: list[Tensor], momenta: list[Tensor], states: States) -> None:
        """Take a step with the frozen variance, and correct its length with the fresh one (`factor`)."""
        before, frozen, fresh = ([state[name] for state in states] for name in ("momentum", "variance", "fresh"))
        decay = group["weight_decay"]
        settings = {"betas": group["betas"], "eps": group["eps"], "decay": decay}
        grown, undecayed, decayed = lamb_direction_(momenta, before, frozen, fresh, parameters, **settings)
        # Only the undecayed part of the direction scales with the gradient.
        if decay:
            share = (undecayed / decayed).nan_to_num(1.0).clamp(max=1.0)
            grown = share * grown + (1 - share)
        # Bounded in value, then in change: with this order the second bound wins if the two conflict.
        last, change = torch.stack([state["factor"] for state in states]), group["factor_change"]
        bounded = grown.clamp(group["least_factor"], group["most_factor"])
        factors = torch.minimum(torch.maximum(bounded, (1 - change) * last), (1 + change) * last)
        copy_each_([state["factor"] for state in states], list(factors.unbind()))
        descend_(group, parameters, momenta, factors * torch.stack([state["trust"] for state in states]))
