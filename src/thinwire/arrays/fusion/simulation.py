# SPDX-License-Identifier: Apache-2.0
"""Simulate the workers of a decentralised method on one device: each is a model of an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from thinwire.arrays.fusion.array import FusedArray
from thinwire.arrays.fusion.optimizers.base import FusedOptimizer
from thinwire.arrays.fusion.store import is_shared, owner_of, rows_of
from thinwire.errors import ConfigError

Order = Literal["while", "after", "inside"]
Mixing = Callable[[int], Tensor | None]
_TOLERANCE = 1e-6


class MixingSimulation:
    r"""Workers as models of an array, whose parameters are mixed by a matrix.

    With $x$ all workers' parameters stacked, $W$ the step's mixing matrix and $d(g)$ the optimizer's step,

    - `while`: $x \leftarrow W x - d(g(x))$, decentralised SGD, in which each worker averages with its neighbours while
      it computes its gradient (Lian et al., NeurIPS 2017, arXiv:1705.09056, Algorithm 1);
    - `after`: $x \leftarrow W (x - d(g(x)))$; with $W = \frac1n 1 1^\top$ every so many steps this is Local SGD (Stich,
      ICLR 2019, arXiv:1805.09767);
    - `inside`: $\tilde g = \frac1\gamma (x - W (x - \gamma g))$ and $x \leftarrow x - d(\tilde g)$; with momentum this
      is DecentLaM (Yuan et al., ICCV 2021, arXiv:2104.11981).

    No message is sent and no process started: dozens of workers take about as long as an array of as many models. The
    matrix of a `Topology` is `torch.from_numpy(topology.matrix(size, step))`.

    Args:
        array: one model per worker; pass each worker's data by `Each`.
        optimizer: of the array.
        mixing: returns W, [workers, workers], for a step counted from 0; None for a step without communication.
        order: when the parameters are mixed.

    Raises:
        ConfigError: an unknown order, or workers whose layers differ in structure.

    Example:
        >>> import torch
        >>> from thinwire.arrays.fusion import SGD, MixingSimulation, fuse
        >>> array = fuse([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
        >>> with torch.no_grad():
        ...     for parameter in array.parameters():
        ...         _ = parameter.copy_(torch.tensor([[[0.0]], [[2.0]]]))
        >>> simulation = MixingSimulation(array, SGD(array.parameters(), lr=0.1), lambda step: torch.full((2, 2), 0.5))
        >>> simulation.spread()
        1.0
        >>> array.losses(torch.mean, array(torch.zeros(1, 1))).sum().backward()
        >>> simulation.step()
        >>> simulation.spread()
        0.0
    """

    def __init__(self, array: FusedArray, optimizer: FusedOptimizer, mixing: Mixing, *, order: Order = "after") -> None:
        if order not in get_args(Order):
            raise ConfigError(f"order={order!r}: must be one of {', '.join(get_args(Order))}")
        for name, tensor in array.named_parameters():
            if owner_of(tensor) is not None and (tensor.requires_grad or not is_shared(tensor)):
                raise ConfigError(f"{name}: only one worker has it, so it has no mean. Fuse models of one structure")
        self.array, self.optimizer, self.mixing, self.order = array, optimizer, mixing, order
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Take one step of all workers, after the sum of the losses was back-propagated.

        Raises:
            ConfigError: the matrix has not one row and column per worker, or its rows do not add up to 1; or a
                learning rate is 0 in the order `inside`, which divides by it.
        """
        matrix, size = self.mixing(self.steps), self.array.size
        if matrix is not None:
            if matrix.shape != (size, size):
                raise ConfigError(f"mixing of shape {list(matrix.shape)}: {size} workers need [{size}, {size}]")
            if bool(((matrix.sum(1) - 1).abs() > _TOLERANCE).any()):
                raise ConfigError("mixing: a row does not add up to 1. Each row must be weights of a mean")
        if matrix is not None and self.order == "inside":
            self._add_mixing_to_gradients(matrix)
        elif matrix is not None and self.order == "while" and self.steps:
            # As in `Gossip`, parameters are sent after a step: before the first step nothing has been received.
            mix_(list(self.array.own_parameters()), matrix)
        self.optimizer.step()
        if matrix is not None and self.order == "after":
            mix_(list(self.array.own_parameters()), matrix)
        self.steps += 1

    def _add_mixing_to_gradients(self, matrix: Tensor) -> None:
        for group in self.optimizer.param_groups:
            if bool((group["lr"] == 0).any()):
                raise ConfigError("lr=0 with order='inside': it divides by lr. Use a small one, not 0")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"].to(parameter).view(-1, *[1] * (parameter.dim() - 1))
                    moved = mixed(parameter - rate * parameter.grad, matrix)
                    parameter.grad = (parameter - moved) / rate

    def spread(self) -> float:
        r"""Return the consensus distance $\sqrt{\frac1n \sum_i \|x_i - \bar x\|^2}$ over all parameters."""
        with torch.no_grad():
            squares = [
                (each - each.mean(0, keepdim=True)).double().square().sum() for each in self.array.own_parameters()
            ]
        return float((torch.stack(squares).sum() / self.array.size).sqrt())


def mixed(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply [workers, ...] by the matrix from the left."""
    return (matrix.to(rows) @ rows_of(rows)).view_as(rows)


@torch.no_grad()
def mix_(parameters: list[torch.nn.Parameter], matrix: Tensor) -> None:
    """Replace every worker's parameters by its weighted mean of all workers', in place."""
    for parameter in parameters:
        parameter.copy_(mixed(parameter, matrix))
