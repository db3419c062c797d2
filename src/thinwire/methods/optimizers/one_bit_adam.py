# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam: Adam whose second stage is momentum SGD with a constant step size for every entry."""

from __future__ import annotations

from torch import Tensor

from thinwire.methods.optimizers.freezing import FreezingAdam, Group, States, adam_step_


class OneBitAdam(FreezingAdam):
    r"""Run Adam until `freeze()`, then momentum SGD divided by the root of the frozen variance.

    $$m \leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2
      \;\text{until frozen}, \qquad x \leftarrow x - \gamma \Big(\frac{m}{\sqrt v + \epsilon} + \lambda x\Big).$$

    Moments have no bias correction. After $v$ is frozen, $m$ is the mean over workers under `CompressedMomentum()`;
    otherwise this worker's gradient updates it.

    State: `momentum`, `variance`, each like the parameters, in fp32 at least; `coefficient` per tensor, after the
    freeze; for parameters in 16 bits `master`.

    Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, ICML 2021,
    arXiv:2102.02888, Algorithm 1.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = OneBitAdam([x], lr=0.1, betas=(0.0, 0.0))
        >>> x.grad = torch.tensor([1.0, 4.0])
        >>> optimizer.step()
        >>> optimizer.freeze()  # the variances stay 1 and 16
        >>> x.grad = torch.tensor([2.0, 4.0])
        >>> optimizer.step()
        >>> [round(value, 4) for value in x.tolist()]  # 0.1 + 0.2 and 0.1 + 0.1
        [-0.3, -0.2]

    Args:
        params: the parameters.
        lr: $\gamma$; warm it up, since without bias correction the first steps are longer: 3.2 times `lr` with the
            default betas and a constant gradient.
        betas: $\beta_1$ and $\beta_2$, each in [0, 1); a larger value averages over more steps.
        eps: $\epsilon$; a larger value shortens the steps of entries with small gradients.
        weight_decay: $\lambda$.

    Raises:
        ConfigError: a value is out of its range.
    """

    def frozen_step(self, group: Group, parameters: list[Tensor], momenta: list[Tensor], states: States) -> None:
        """Move along the new momentum."""
        before, frozen = ([state[name] for state in states] for name in ("momentum", "variance"))
        adam_step_(group, parameters, momenta, frozen, before)
