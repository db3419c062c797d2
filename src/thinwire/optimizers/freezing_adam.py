"""What 1-bit Adam and 0/1 Adam have in common: Adam without corrections, whose variance may stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.kernels.adaptive import adam_descend_
from thinwire.optimizers.freezing import FreezingOptimizer
from thinwire.optimizers.lamb import check_adaptive, take_in_


class FreezingAdam(FreezingOptimizer):
    """Adam in two stages, of which a subclass defines the second.

    Args:
        params: the parameters.
        lr: the learning rate.
        betas: how long moments remember, each in [0, 1).
        eps: bounds the steps of entries with small gradients.
        weight_decay: a pull towards zero.

    Attributes:
        begins: what subclasses keep in each parameter group, at first.

    Raises:
        ConfigError: a value out of its range.
    """

    begins: ClassVar[Mapping[str, Any]] = {}

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
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, **self.begins})

    def on_begin(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Nothing besides the moments."""

    def on_freeze(self, groups: Sequence[tuple[dict[str, Any], list[dict[str, Tensor]]]]) -> None:
        """Momenta are sent as they are: all coefficients are 1."""
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
        go_down_(group, parameters, momenta, variances)


def go_down_(
    group: dict[str, Any],
    parameters: list[Tensor],
    momenta: list[Tensor],
    variances: list[Tensor],
    before: list[Tensor] | None = None,
) -> None:
    """A step along Adam's direction; where `before` is given, the momenta take its place in the state."""
    settings = {"eps": group["eps"], "decay": group["weight_decay"], "rate": float(group["lr"])}
    adam_descend_(parameters, before or momenta, momenta, variances, **settings)
