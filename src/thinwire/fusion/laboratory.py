"""Many workers of a decentralised method on one device: a row of an array each, mixed by a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.fusion.array import FusedArray
from thinwire.fusion.optimizers.base import FusedOptimizer
from thinwire.fusion.store import owner_of

Order = Literal["while", "after", "inside"]
Mixing = Callable[[int], Tensor | None]
_TOLERANCE = 1e-6


class Laboratory:
    r"""Workers as rows of an array, which say to each other what a mixing matrix lets them.

    With $x$ all workers' parameters stacked, $W$ the step's matrix and $d(g)$ what the optimizer takes away,

    - `while`: $x \leftarrow W x - d(g(x))$, as decentralised SGD combines while it adapts (Lian et al., NeurIPS 2017,
      arXiv:1705.09056, Algorithm 1);
    - `after`: $x \leftarrow W (x - d(g(x)))$; the matrix of equal shares at every so many steps is Local SGD (Stich,
      ICLR 2019, arXiv:1805.09767);
    - `inside`: $\tilde g = \frac1\gamma (x - W (x - \gamma g))$ and $x \leftarrow x - d(\tilde g)$, which is DecentLaM
      where the optimizer has a momentum (Yuan et al., ICCV 2021, arXiv:2104.11981).

    No message is sent and no process started, so that dozens of workers take about as long as an array of as many
    models. A `Topology` gives its matrices by `torch.from_numpy(topology.matrix(size, step))`.

    Args:
        array: a row for each worker; each is fed its own data by `Each`.
        optimizer: of the array.
        mixing: W of a step, [workers, workers], counted from 0; None where nobody speaks.
        order: when rows are mixed.

    Raises:
        ConfigError: an unknown order, or workers whose layers differ in structure.
    """

    def __init__(self, array: FusedArray, optimizer: FusedOptimizer, mixing: Mixing, *, order: Order = "after") -> None:
        if order not in get_args(Order):
            raise ConfigError(f"order={order!r}: must be one of {', '.join(get_args(Order))}")
        alone = next((name for name, tensor in array.named_parameters() if owner_of(tensor) is not None), None)
        if alone is not None:
            raise ConfigError(f"{alone}: only one worker has it, so there is no mean of it; fuse models that are alike")
        self.array, self.optimizer, self.mixing, self.order = array, optimizer, mixing, order
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """One step of all workers, after the losses' sum was back-propagated.

        Raises:
            ConfigError: a matrix that is not one row and column per worker, or whose rows do not add up to one; or a
                learning rate of 0 in the order `inside`, which divides by it.
        """
        matrix = self._matrix()
        if matrix is not None and self.order == "inside":
            self._correct(matrix)
        elif matrix is not None and self.order == "while" and self.steps:
            # Before the first step nothing was sent.
            mix_(list(self.array.parameters()), matrix)
        self.optimizer.step()
        if matrix is not None and self.order == "after":
            mix_(list(self.array.parameters()), matrix)
        self.steps += 1

    def _matrix(self) -> Tensor | None:
        found, size = self.mixing(self.steps), self.array.size
        if found is None:
            return None
        if found.shape != (size, size):
            raise ConfigError(f"mixing of shape {list(found.shape)}: {size} workers have [{size}, {size}]")
        if bool(((found.sum(1) - 1).abs() > _TOLERANCE).any()):
            raise ConfigError("mixing: a row does not add up to 1; each worker's vector is a mean of what it hears")
        return found

    def _correct(self, matrix: Tensor) -> None:
        """Put what mixing would move into the gradients."""
        for group in self.optimizer.param_groups:
            if bool((group["lr"] == 0).any()):
                raise ConfigError("lr=0 with order='inside': it divides by lr; use a small one, not 0")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"].to(parameter).view(-1, *[1] * (parameter.dim() - 1))
                    moved = mixed(parameter - rate * parameter.grad, matrix)
                    parameter.grad = (parameter - moved) / rate

    def spread(self) -> float:
        r"""The consensus distance $\sqrt{\frac1n \sum_i \|x_i - \bar x\|^2}$ over all parameters."""
        with torch.no_grad():
            squares = [(each - each.mean(0, keepdim=True)).double().square().sum() for each in self.array.parameters()]
        return float((torch.stack(squares).sum() / self.array.size).sqrt())


def mixed(rows: Tensor, matrix: Tensor) -> Tensor:
    """Each row as a mean of all: [workers, ...] multiplied by the matrix from the left."""
    return (matrix.to(rows) @ rows.flatten(1)).view_as(rows)


@torch.no_grad()
def mix_(parameters: list[torch.nn.Parameter], matrix: Tensor) -> None:
    """Replace every worker's parameters by its mean of all workers', in place."""
    for parameter in parameters:
        parameter.copy_(mixed(parameter, matrix))
