"""The base class of strategies: hyperparameters, and a few hooks around the optimizer's step."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.comm.work import Work
from thinwire.reduce.compressed_all_reduce import mean_
from thinwire.replica.replica import Replica


class Strategy(ABC):  # noqa: B024
    """A frozen dataclass of hyperparameters that decides what workers send, and when.

    It holds no tensor: everything that changes lies in the `Replica` that each hook is given. Its repr is the recipe.
    Every hook may be left as it is; without any, workers send nothing. All ranks call the hooks in the same order.

    Attributes:
        paper: where the method comes from.
        waits: which worker waits for which, and when.
        limits: what it assumes, and when not to use it.

    Example:
        A strategy that averages the parameters after every second step:

        >>> from dataclasses import dataclass
        >>> import torch
        >>> import thinwire
        >>> @dataclass(frozen=True)
        ... class EverySecondStep(thinwire.Strategy):
        ...     def after_step(self, r):
        ...         if r.step % 2 == 0:
        ...             self.average_(r)
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     thinwire.attach(model, optimizer, EverySecondStep(), comm=comm)
        ...     for _ in range(2):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(2, train)
        [-1.0, -1.0]
    """

    paper: ClassVar[str] = ""
    waits: ClassVar[str] = "no worker waits for another"
    limits: ClassVar[str] = ""

    @property
    def sends_gradients(self) -> bool:
        """Whether gradients are sent during the backward pass, through `on_gradient`."""
        return False

    @property
    def skips_steps(self) -> bool:
        """Whether a worker that is late skips steps, and continues at the step where the others are."""
        return False

    @property
    def reads_gradient(self) -> bool:
        """Whether `before_step` needs `r.g`, and may change it."""
        return False

    @property
    def moves_parameters(self) -> bool:
        """Whether a hook before or after the optimizer's step may change `r.x` or the gradient.

        An optimizer that computes the parameters from its own state at every step would undo such a change. A wrapper
        that only measures returns its base's answer.
        """
        kind = type(self)
        return kind.before_step is not Strategy.before_step or kind.after_step is not Strategy.after_step

    def gradient_buffer(self, x: Tensor) -> Tensor:
        """A vector for `r.g`: like `x` where this strategy uses gradients, empty elsewhere."""
        return torch.zeros_like(x) if self.sends_gradients or self.reads_gradient else x.new_empty(0)

    def check(self, size: int) -> None:
        """Refuse a number of workers that the recipe does not work with, before anything is sent.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that does not work with this recipe, such as one with a second momentum.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """

    def start(self, r: Replica) -> None:
        """Allocate `r.state`; `r.x` holds the initial parameters, equal on all ranks."""

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """Start to send `r.g[part]`, which is final. Parts arrive in one fixed order; the engine waits for the work."""

    def before_step(self, r: Replica) -> None:
        """Runs when the gradient is complete, before the optimizer changes `r.x`."""

    def after_step(self, r: Replica) -> None:
        """Runs when the optimizer has changed `r.x`; `r.step` includes this step already."""

    def average_(self, r: Replica) -> None:
        """Replace `r.x` on every rank by the exact average over workers, messages in flight included."""
        mean_(r.comm, r.x).wait()

    def consensus(self, r: Replica) -> Tensor:
        """The vector to evaluate and export, equal on all ranks; `r` is not changed."""
        return mean_(r.comm, r.x.clone()).wait()
