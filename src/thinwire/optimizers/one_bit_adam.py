"""1-bit Adam: Adam whose second stage is momentum SGD with a step size for every entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from thinwire.optimizers.freezing_adam import FreezingAdam, go_down_


class OneBitAdam(FreezingAdam):
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

    def frozen_step(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        momenta: list[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> None:
        """Along the new momentum."""
        before, frozen = ([state[name] for state in states] for name in ("momentum", "variance"))
        go_down_(group, parameters, momenta, frozen, before)
