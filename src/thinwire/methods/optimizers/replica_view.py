# SPDX-License-Identifier: Apache-2.0
"""A freezing optimizer, addressed by slices of a replica's flat vectors, for strategies of the 1-bit family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.replica.flat import Segment
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.optimizers.freezing import FreezingOptimizer


@dataclass(frozen=True)
class ReplicaView:
    """The worker's optimizer, with its parameters that belong to one replica.

    Attributes:
        optimizer: the worker's optimizer, which may have parameters in other replicas too.
        parameters: the replica's parameters.
        segments: the position of each parameter in the replica's vectors.
    """

    optimizer: FreezingOptimizer
    parameters: Sequence[Tensor]
    segments: Sequence[Segment]

    @property
    def has_first_parameter(self) -> bool:
        """True if the replica has the optimizer's first parameter; that replica decides for all."""
        everything = (p for group in self.optimizer.param_groups for p in group["params"])
        # A parameter without elements is in no replica.
        first = next(p for p in everything if p.requires_grad and p.numel())
        return any(parameter is first for parameter in self.parameters)

    @property
    def variance_steps(self) -> int:
        r"""The time constant of the variance in steps, $1/(1-\beta_2)$."""
        return max(1, round(1 / (1 - max(group["betas"][1] for group in self.optimizer.param_groups))))

    def within(self, part: slice, vector: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters in a part of the replica's vectors, and their segments of `vector`."""
        chosen = [
            (parameter, segment.of(vector))
            for parameter, segment in zip(self.parameters, self.segments, strict=True)
            if part.start <= segment.start and segment.stop <= part.stop
        ]
        return [p for p, _ in chosen], [view for _, view in chosen]

    def next_momenta_(
        self, part: slice, target: Tensor, gradient: Tensor, *, share: float, rescale: bool = False
    ) -> None:
        """Write this worker's momentum after a gradient into a part of `target`, which may be the gradient."""
        parameters, momenta = self.within(part, target)
        gradients = momenta if target is gradient else self.within(part, gradient)[1]
        self.optimizer.next_momenta_(momenta, gradients, parameters, share=share, rescale=rescale)


def momentum_vector(r: Replica, *, overwrites: bool = True) -> Tensor:
    """Return the vector for momenta: the gradient itself if it may be overwritten and its dtype is exact enough."""
    if overwrites and r.g.dtype in (torch.float32, torch.float64):
        return r.g
    if "message" not in r.state:
        r.state["message"] = torch.zeros_like(r.g, dtype=torch.promote_types(r.g.dtype, torch.float32))
    return r.state["message"]


def replica_view(r: Replica) -> ReplicaView:
    """Make the view of a replica's freezing optimizer.

    Raises:
        ConfigError: the replica has another optimizer, or none.
    """
    optimizer = r.moments.optimizer
    if not isinstance(optimizer, FreezingOptimizer):
        raise ConfigError(
            f"{type(optimizer).__name__}: its variance cannot be frozen. Give the replica the moments of OneBitAdam, "
            "OneBitLamb or ZeroOneAdam, as attach does"
        )
    return ReplicaView(optimizer, r.moments.parameters, r.segments)
