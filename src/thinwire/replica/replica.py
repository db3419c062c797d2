"""What is here: one worker's copy of the model, as a strategy sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.replica.moments import Moments

T = TypeVar("T")
_LOOKED_AT = 65_536


class Named(MutableMapping[str, T]):
    """Those entries of a mapping whose names begin in the same way, by the rest of their names."""

    def __init__(self, whole: MutableMapping[str, T], begin: str) -> None:
        self._whole = whole
        self._begin = begin

    def __getitem__(self, name: str) -> T:
        return self._whole[self._begin + name]

    def __setitem__(self, name: str, value: T) -> None:
        self._whole[self._begin + name] = value

    def __delitem__(self, name: str) -> None:
        del self._whole[self._begin + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._begin) for name in list(self._whole) if name.startswith(self._begin))

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
        samples: what this rank's step counts for in averages that are weighted by it: what the loop said, 1 where it
            said nothing, 0 where the step had no gradient.
        loss: what the loop said of this step's loss, a number in fp32 with the parameters; None where it said nothing.
        moments: what the worker's optimizer remembers of these parameters.
        observed: what the strategy has noticed in this step, by name, as numbers for the metrics; not saved.
    """

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        comm: Comm,
        *,
        lr: Callable[[], float | Tensor],
        seed: int = 0,
        moments: Moments | None = None,
    ) -> None:
        self.x = x
        self.g = g
        self.comm = comm
        self.seed = seed
        self.samples = 1.0
        self.loss: Tensor | None = None
        self.moments = moments or Moments()
        self.step = 0
        self.active = comm.size
        self.state: MutableMapping[str, Tensor] = {}
        self.inflight: MutableMapping[str, Work[list[Tensor]]] = {}
        self.metrics: dict[str, float | Tensor] = {}
        self._lr = lr

    @property
    def lr(self) -> float | Tensor:
        """The optimizer's learning rate now; a vector like `x` where parameter groups differ in it."""
        return self._lr()

    def part(self, name: str, where: slice, *, ahead: int = 0) -> Replica:
        """A part of the vectors as a replica of its own, that shares their memory and keeps its state in theirs.

        Args:
            name: its names in `state` and `inflight` begin with this.
            where: of the vectors.
            ahead: how many steps its clock is ahead.
        """

        def lr() -> float | Tensor:
            rate = self.lr
            return rate[where] if isinstance(rate, Tensor) and rate.ndim else rate

        part = Replica(self.x[where], self.g[where], self.comm, lr=lr, seed=self.seed)
        part.step, part.active, part.samples = self.step + ahead, self.active, self.samples
        part.loss = self.loss
        part.state = Named(self.state, f"{name}/")
        part.inflight = Named(self.inflight, f"{name}/")
        part.metrics = self.metrics
        return part

    def launch(self, name: str, work: Work[list[Tensor]]) -> None:
        """Leave a message in flight under a name, to be collected at a later step."""
        self.inflight[name] = work

    def collect(self, name: str) -> list[Tensor] | None:
        """Wait for the message of that name and return what arrived; None when none is in flight."""
        work = self.inflight.pop(name, None)
        return None if work is None else work.wait()

    def notice_distance(self, mine: Tensor, theirs: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> None:
        """Note how far workers are apart, from messages that came anyway: nothing is sent for it.

        Two workers drawn at random are the square root of two further apart than a worker and the mean, so
        `observed["consensus_distance"]` estimates the latter: the Euclidean distance of one worker's parameters from
        the mean of all. It looks at 65,536 elements at most, spread evenly over the vector.

        Args:
            mine: this worker's vector, as it was when theirs were sent (where they are late, their delay counts too).
            theirs: other workers' vectors, like it.
            weights: push-sum's, of this worker and of the others, by which vectors are to be divided first.
        """
        stride = -(-mine.numel() // _LOOKED_AT)
        samples = [y[::stride] for y in (mine, *theirs)]
        if weights:
            samples = [y / weight for y, weight in zip(samples, weights, strict=True)]
        sample = samples[0]
        squares = [(y - sample).square().sum(dtype=torch.float64) for y in samples[1:]]
        if squares:
            share = mine.numel() / sample.numel()
            self.metrics["consensus_distance"] = (torch.stack(squares).mean() * share / 2).sqrt()

    def wait_pending(self) -> None:
        """Wait for everything in flight without using it: afterwards `x` and the state are the worker's alone."""
        for work in self.inflight.values():
            work.wait()

    def zeros_state(self, name: str) -> Tensor:
        """A state vector like `x`, zero at first."""
        if name not in self.state:
            self.state[name] = torch.zeros_like(self.x)
        return self.state[name]


def as_number(value: Tensor | float, x: Tensor, name: str) -> Tensor:
    """A number in fp32 on the device of `x`, without its history.

    Args:
        value: a number or a tensor of one element.
        x: the parameters.
        name: what it is, for the error.

    Raises:
        ConfigError: it has several elements.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigError(f"{name}: a tensor of shape {tuple(value.shape)}, not one number; take its mean")
        return value.detach().reshape(()).to(x.device, torch.float32, copy=True)
    return torch.tensor(float(value), dtype=torch.float32, device=x.device)
