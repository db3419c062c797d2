"""What a strategy is: hyperparameters and a few hooks around the optimizer's step."""

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
    """A frozen dataclass of hyperparameters; it holds no tensor, and its repr is the recipe.

    Every hook may be left as it is; together they are "say nothing". All ranks call them in the same order.

    Attributes:
        paper: where the method comes from.
        waits: who blocks on whom, and when.
        limits: what it assumes, and when not to use it.
    """

    paper: ClassVar[str] = ""
    waits: ClassVar[str] = "nobody waits for anybody"
    limits: ClassVar[str] = ""

    @property
    def sends_gradients(self) -> bool:
        """Whether gradients are exchanged during the backward pass, through `on_gradient`."""
        return False

    @property
    def leaves_out_steps(self) -> bool:
        """Whether a late worker goes on where others are, without taking every step itself."""
        return False

    @property
    def reads_gradient(self) -> bool:
        """Whether `before_step` needs `r.g`, and may rewrite it."""
        return False

    @property
    def moves_parameters(self) -> bool:
        """Whether it has a hook before or after the optimizer's step, where it may change `r.x` or the gradient.

        An optimizer that computes the parameters from its own state at every step would undo such a change. A wrapper
        that only looks answers as its base.
        """
        kind = type(self)
        return kind.before_step is not Strategy.before_step or kind.after_step is not Strategy.after_step

    def room_for_gradient(self, x: Tensor) -> Tensor:
        """A vector for `r.g`: like `x` where this strategy uses gradients, empty elsewhere."""
        return torch.zeros_like(x) if self.sends_gradients or self.reads_gradient else x.new_empty(0)

    def check(self, size: int) -> None:
        """Refuse a number of workers that the recipe cannot serve, before anything is sent.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that this recipe cannot go with, such as a second momentum.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """

    def start(self, r: Replica) -> None:
        """Allocate `r.state`; `r.x` holds the initial parameters, equal on all ranks."""

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """`r.g[part]` is final: start to exchange it. Parts come in one fixed order; the engine waits."""

    def before_step(self, r: Replica) -> None:
        """The gradient is ready, `r.x` has not moved."""

    def after_step(self, r: Replica) -> None:
        """`r.x` has moved; `r.step` counts this step already."""

    def average_(self, r: Replica) -> None:
        """Bring `r.x` on every rank to the exact average of what all workers know."""
        mean_(r.comm, r.x).wait()

    def consensus(self, r: Replica) -> Tensor:
        """The vector to evaluate and to ship, equal on all ranks; `r` stays as it is."""
        return mean_(r.comm, r.x.clone()).wait()
