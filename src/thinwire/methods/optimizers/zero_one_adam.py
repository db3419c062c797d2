# SPDX-License-Identifier: Apache-2.0
"""0/1 Adam: Adam whose variance and momentum are synchronized less and less often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.core.replica.flat import copy_each_
from thinwire.core.torch_internals import foreach
from thinwire.methods.optimizers.freezing import FreezingAdam, Group, States, adam_step_
from thinwire.methods.optimizers.lamb import denominators_of


class ZeroOneAdam(FreezingAdam):
    r"""Run Adam with three kinds of steps; `ZeroOne()` chooses one each time.

    With $x'$ and $t'$ the parameters and the step of the last synchronization, on worker $i$,

    $$m_i \leftarrow \beta_1 m_i + (1-\beta_1) g_i, \qquad u_i \leftarrow u_i + \gamma_t m_i, \qquad
      x_i \leftarrow x_i - \gamma_t \frac{m_i}{\sqrt v + \epsilon} \quad \text{(local)},$$

    $$m \leftarrow \frac{\bar u}{\sum_{k=t'}^t \gamma_k}, \qquad x \leftarrow x' - \frac{\bar u}{\sqrt v + \epsilon},
      \qquad u \leftarrow 0 \quad \text{(synchronized)},$$

    where $\bar u$ is the compressed mean of all $u_i$, this step's included; and, with $g$ the mean gradient of all
    workers,

    $$m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad
      x \leftarrow x - \gamma \frac{m}{\sqrt v + \epsilon} \quad \text{(full)} .$$

    Moments have no bias correction. Weight decay acts on $x$ and $x'$ alike and is not part of $u$, so momenta do
    not contain it. Without a strategy every step is a full one, until `freeze()`.

    State: `momentum`, `variance`, each like the parameters, in fp32 at least; from the first local step on, `anchor`
    ($x'$) and `update_sum` ($u$) too; for parameters in 16 bits `master`.

    Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, ICLR 2023, arXiv:2202.06009,
    Algorithm 1.

    Example:
        >>> x = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = ZeroOneAdam([x], lr=0.1, betas=(0.0, 0.0))
        >>> for kind in ("full", "local", "local"):
        ...     if kind == "local":
        ...         optimizer.freeze()
        ...         optimizer.set_local(local=True)
        ...     x.grad = torch.ones(1)
        ...     optimizer.step()
        >>> [round(float(value), 4) for value in (x.detach(), optimizer.state[x]["update_sum"])]
        [-0.3, 0.2]

    Args:
        params: the parameters.
        lr: $\gamma$.
        betas: $\beta_1$ and $\beta_2$, each in [0, 1); a larger value averages over more steps.
        eps: $\epsilon$; a larger value shortens the steps of entries with small gradients.
        weight_decay: $\lambda$.

    Raises:
        ConfigError: a value is out of its range.
    """

    # `local` marks local steps; `lr_sum` is the sum of their learning rates since the last synchronization.
    group_defaults: ClassVar[Mapping[str, Any]] = {"lr_sum": 0.0, "local": False}

    def unfreeze(self) -> None:
        """Let the next gradient update the variance; it must be equal on all workers."""
        for group in self.param_groups:
            group["frozen"] = False

    def set_local(self, *, local: bool) -> None:
        """Choose whether the next steps are local, until the next synchronization."""
        for group in self.param_groups:
            group["local"] = local

    def forget_local_steps(self) -> None:
        """Restart local steps at the current parameters, as after a synchronization."""
        for group in self.param_groups:
            group["lr_sum"] = 0.0

    def on_send(self, group: Group, momenta: list[Tensor], states: States) -> None:
        """Send the mean momentum since the last synchronization, each step weighted by its learning rate.

        The mean has the size of one momentum however many steps it covers, so residuals keep their scale when the gaps
        between synchronizations grow.
        """
        if group["lr_sum"] == 0.0:
            # No local step since the last synchronization: the momentum is the mean.
            return
        lr = float(group["lr"])
        foreach.mul_(momenta, lr)
        foreach.add_(momenta, [state["update_sum"] for state in states])
        foreach.div_(momenta, group["lr_sum"] + lr)

    def frozen_step(self, group: Group, parameters: list[Tensor], momenta: list[Tensor], states: States) -> None:
        """Move along this worker's momentum, or from the last synchronized parameters along the mean momentum."""
        copy_each_([state["momentum"] for state in states], momenta)
        lr, variances = float(group["lr"]), [state["variance"] for state in states]
        if group["local"]:
            for parameter, state in zip(parameters, states, strict=True):
                if "anchor" not in state:
                    state["anchor"], state["update_sum"] = (
                        parameter.detach().clone(),
                        torch.zeros_like(state["momentum"]),
                    )
            anchors, sums = ([state[name] for state in states] for name in ("anchor", "update_sum"))
            # The first local step after a synchronization: later ones return to this point.
            if group["lr_sum"] == 0.0:
                copy_each_(anchors, parameters)
                foreach.zero_(sums)
            foreach.add_(sums, momenta, alpha=lr)
            # The synchronization replaces the parameters with the anchor, so weight decay must act on both.
            foreach.mul_(anchors, 1 - lr * group["weight_decay"])
        elif group["lr_sum"]:
            # One step along the mean momentum, of the sum of their lengths, replaces the local steps.
            denominators = denominators_of(group, variances)
            copy_each_(parameters, [state["anchor"] for state in states])
            foreach.mul_(parameters, 1 - lr * group["weight_decay"])
            foreach.addcdiv_(parameters, momenta, denominators, value=-group["lr_sum"] - lr)
            return
        adam_step_(group, parameters, momenta, variances)

    def on_moved(self, group: Group) -> None:
        """Add up the learning rates since the last synchronization."""
        group["lr_sum"] = group["lr_sum"] + float(group["lr"]) if group["local"] else 0.0
