"""1-bit Adam: Adam whose second stage is momentum SGD with a step size for every entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.flat import copy_each_
from laconic.optimizers.lamb import add_decay_, check_adaptive, directions_of, take_in_
from laconic.optimizers.one_bit_base import FreezingOptimizer


class OneBitAdam(FreezingOptimizer):
    r"""Adam until `freeze()`; from then on momentum, divided by the variance as it was at that moment.

    $$m \leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2
      \;\text{until frozen}, \qquad x \leftarrow x - \gamma \Big(\frac{m}{\sqrt v + \epsilon} + \lambda x\Big).$$

    No moment is corrected for having begun at zero. Under `CompressedMomentum()` $m$ is what all workers agreed on once
    $v$ is frozen; otherwise it follows the gradient.
    State: `momentum`, `variance`, each like the parameters, in fp32 at least; `coefficient` per tensor, once frozen;
    for parameters in 16 bits `master`.

    Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, ICML 2021,
    arXiv:2102.02888, Algorithm 1.

    Args:
        params: the parameters.
        lr: $\gamma$; the first steps are short without a correction, so that no warm-up of it is needed for them.
        betas: $\beta_1$ and $\beta_2$, each in [0, 1); more remembers longer.
        eps: $\epsilon$; more bounds the steps of entries with small gradients.
        weight_decay: $\lambda$.

    Raises:
        ConfigError: a value out of its range.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_adaptive(lr, betas, eps, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def on_begin(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Nothing besides the moments."""

    def on_freeze(self, groups: Sequence[tuple[dict[str, Any], list[dict[str, Tensor]]]]) -> None:
        """Momenta are said as they are."""
        for _, states in groups:
            for state in states:
                state["coefficient"] = torch.ones((), dtype=state["momentum"].dtype, device=state["momentum"].device)

    def warm_step(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> None:
        """Adam without corrections."""
        momenta, variances = ([state[name] for state in states] for name in ("momentum", "variance"))
        take_in_(group, momenta, variances, gradients)
        _descend_(group, parameters, momenta, variances)

    def frozen_step(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        momenta: list[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> None:
        """Along the new momentum."""
        copy_each_([state["momentum"] for state in states], momenta)
        _descend_(group, parameters, momenta, [state["variance"] for state in states])


def _descend_(group: dict[str, Any], parameters: list[Tensor], momenta: list[Tensor], variances: list[Tensor]) -> None:
    directions = directions_of(group, momenta, variances)
    add_decay_(group, directions, parameters)
    torch._foreach_add_(parameters, directions, alpha=-float(group["lr"]))  # pyright: ignore
