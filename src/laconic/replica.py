"""What is here: one worker's copy of the model, as a strategy sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laconic.comm.base import Comm, Work


class Replica:
    """Flat vectors, named state, a step and messages in flight; nothing of models, hooks or processes.

    Attributes:
        x: the parameters, one vector; the model's parameters are views of it.
        g: the gradient, like `x`, where the strategy sends or reads it; empty elsewhere.
        comm: the ranks that train together.
        state: what the strategy remembers, by name; saved and restored as it is.
        inflight: messages that were launched and not yet collected, by name.
        step: optimizer steps done.
        active: ranks that still have data; a mean of gradients divides by this.
        seed: the key of every random draw, equal on all ranks.
        observed: what the strategy has noticed lately, by name, as numbers for the metrics; not saved.
    """

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        comm: Comm,
        *,
        lr: Callable[[], float | Tensor],
        seed: int = 0,
    ) -> None:
        self.x = x
        self.g = g
        self.comm = comm
        self.seed = seed
        self.step = 0
        self.active = comm.size
        self.state: dict[str, Tensor] = {}
        self.inflight: dict[str, Work[list[Tensor]]] = {}
        self.observed: dict[str, float | Tensor] = {}
        self._lr = lr

    @property
    def lr(self) -> float | Tensor:
        """The optimizer's learning rate now; a vector like `x` where parameter groups differ in it."""
        return self._lr()

    def launch(self, name: str, work: Work[list[Tensor]]) -> None:
        """Leave a message in flight under a name, to be collected at a later step."""
        self.inflight[name] = work

    def collect(self, name: str) -> list[Tensor] | None:
        """Wait for the message of that name and return what arrived; None when none is in flight."""
        work = self.inflight.pop(name, None)
        return None if work is None else work.wait()

    def settle(self) -> None:
        """Wait for everything in flight without using it: afterwards `x` and the state are the worker's alone."""
        for work in self.inflight.values():
            work.wait()

    def scratch(self, name: str) -> Tensor:
        """A state vector like `x`, zero at first."""
        if name not in self.state:
            self.state[name] = torch.zeros_like(self.x)
        return self.state[name]
