"""0/1 Adam: Adam whose variance moves ever more seldom, and whose momentum is agreed on ever more seldom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.optimizers.freezing_adam import FreezingAdam, go_down_
from thinwire.optimizers.lamb import spreads_of
from thinwire.replica.flat import copy_each_


class ZeroOneAdam(FreezingAdam):
    r"""Adam in three kinds of steps, of which `ZeroOne()` chooses one each time.

    With $x'$ and $t'$ the parameters and the step of the last agreement, on worker $i$,

    $$m_i \leftarrow \beta_1 m_i + (1-\beta_1) g_i, \qquad u_i \leftarrow u_i + \gamma_t m_i, \qquad
      x_i \leftarrow x_i - \gamma_t \frac{m_i}{\sqrt v + \epsilon} \quad \text{(alone)},$$

    $$m \leftarrow \frac{\bar u}{\sum_{k=t'}^t \gamma_k}, \qquad x \leftarrow x' - \frac{\bar u}{\sqrt v + \epsilon},
      \qquad u \leftarrow 0 \quad \text{(agreed)},$$

    where $\bar u$ is the coded mean of all $u_i$, this step's included; and, where the gradient is the mean $g$ of all
    workers',

    $$m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad
      x \leftarrow x - \gamma \frac{m}{\sqrt v + \epsilon} \quad \text{(whole)} .$$

    No moment is corrected for having begun at zero. Weight decay pulls at $x$ and $x'$ alike and is no part of $u$, so
    that momenta stay free of it. Alone, without a strategy, every step is whole, until `freeze()`.
    State: `momentum`, `variance`, each like the parameters, in fp32 at least; once steps were taken alone, `anchor`
    ($x'$) and `travelled` ($u$) too; for parameters in 16 bits `master`.

    Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, ICLR 2023, arXiv:2202.06009,
    Algorithm 1.

    Args:
        params: the parameters.
        lr: $\gamma$.
        betas: $\beta_1$ and $\beta_2$, each in [0, 1); more remembers longer.
        eps: $\epsilon$; more bounds the steps of entries with small gradients.
        weight_decay: $\lambda$.

    Raises:
        ConfigError: a value out of its range.
    """

    begins: ClassVar[Mapping[str, Any]] = {"reach": 0.0, "alone": False}

    def thaw(self) -> None:
        """Let the variance follow the next gradient, which must be equal on all workers."""
        for group in self.param_groups:
            group["frozen"] = False

    def go_alone(self, alone: bool) -> None:
        """Whether the coming steps follow this worker's own gradient until the next agreement."""
        for group in self.param_groups:
            group["alone"] = alone

    def on_send(self, group: dict[str, Any], momenta: list[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
        """Send the mean momentum since the last agreement, each step weighted by its learning rate.

        A mean has the size of one momentum however many steps it is over, so that the residual of an earlier agreement
        still fits the next one, which may lie more steps apart.
        """
        if group["reach"] == 0.0:
            return
        lr = float(group["lr"])
        torch._foreach_mul_(momenta, lr)  # pyright: ignore
        torch._foreach_add_(momenta, [state["travelled"] for state in states])  # pyright: ignore
        torch._foreach_div_(momenta, group["reach"] + lr)  # pyright: ignore

    def frozen_step(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        momenta: list[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> None:
        """Along this worker's momentum, or from the last agreement along what all have agreed on."""
        copy_each_([state["momentum"] for state in states], momenta)
        lr, variances = float(group["lr"]), [state["variance"] for state in states]
        if group["alone"]:
            for parameter, state in zip(parameters, states, strict=True):
                if "anchor" not in state:
                    state["anchor"], state["travelled"] = (
                        parameter.detach().clone(),
                        torch.zeros_like(state["momentum"]),
                    )
            anchors, travelled = ([state[name] for state in states] for name in ("anchor", "travelled"))
            if group["reach"] == 0.0:
                copy_each_(anchors, parameters)
                torch._foreach_zero_(travelled)  # pyright: ignore
            torch._foreach_add_(travelled, momenta, alpha=lr)  # pyright: ignore
            # The anchor decays with the parameters, as the agreement replaces them by it.
            torch._foreach_mul_(anchors, 1 - lr * group["weight_decay"])  # pyright: ignore
        elif group["reach"]:
            # From the last agreement along the agreed mean momentum, as far as all steps since then went together.
            spreads = spreads_of(group, variances)
            copy_each_(parameters, [state["anchor"] for state in states])
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])  # pyright: ignore
            torch._foreach_addcdiv_(parameters, momenta, spreads, value=-group["reach"] - lr)  # pyright: ignore
            return
        go_down_(group, parameters, momenta, variances)

    def on_moved(self, group: dict[str, Any]) -> None:
        """Add up how far the group has gone since the last agreement."""
        group["reach"] = group["reach"] + float(group["lr"]) if group["alone"] else 0.0
