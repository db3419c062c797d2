# SPDX-License-Identifier: Apache-2.0
"""One worker's copy of the model, as strategies use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.pending import PendingMeans
from thinwire.core.comm.work import Work
from thinwire.core.replica.flat import Segment, cut_out
from thinwire.core.replica.moments import Moments
from thinwire.errors import ConfigError

T = TypeVar("T")
_SAMPLE_SIZE = 65_536


class PrefixView(MutableMapping[str, T]):
    """A view of a mapping's entries with a prefix, by their names without it."""

    def __init__(self, whole: MutableMapping[str, T], prefix: str) -> None:
        self._whole = whole
        self._prefix = prefix

    def __getitem__(self, name: str) -> T:
        return self._whole[self._prefix + name]

    def __setitem__(self, name: str, value: T) -> None:
        self._whole[self._prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del self._whole[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in list(self._whole) if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass
class Progress:
    """The values that a replica and its parts share."""

    active: int
    step: int = 0
    samples: float = 1.0
    equal_start: bool = True
    postponed: bool = False
    loss: Tensor | None = None
    metrics: MutableMapping[str, float | Tensor] = field(default_factory=dict[str, float | Tensor])


class _OfProgress(Generic[T]):
    """An attribute of a replica that is stored in its `progress`, and so is the same for all its parts."""

    def __set_name__(self, owner: type[Replica], name: str) -> None:
        self._name = name

    def __get__(self, r: Replica, owner: type[Replica]) -> T:
        return getattr(r.progress, self._name)

    def __set__(self, r: Replica, value: T) -> None:
        setattr(r.progress, self._name, value)


class Replica:
    """One worker's parameters and gradient as flat vectors, with named state, a step and operations in flight.

    It knows nothing of models, hooks or processes, so a strategy can run on any vector.

    Attributes:
        x: the parameters, one vector; the model's parameters are views of it.
        g: the gradient, like `x`, if the strategy sends or reads it; otherwise empty.
        comm: the ranks that train together.
        state: the strategy's tensors by name; saved in checkpoints and restored bitwise.
        inflight: launched operations that are not yet collected, by name.
        step: optimizer steps done.
        active: ranks that still have data; the divisor of a mean of gradients.
        seed: the seed of all random draws, equal on all ranks.
        samples: this rank's weight in weighted averages of this step: the `num_samples` of `Worker.record_batch`, 1 if
            it was not called, 0 if the step had no gradient.
        equal_start: whether all ranks start from equal parameters; False only after `attach(init="own")`.
        postponed: whether means of parameters that would start at this step are skipped, and their rounds continue;
            only strategies with the trait `postpones` use it.
        loss: the loss that was passed to `Worker.record_batch`, in fp32 on the device of `x`; None if there was none.
        segments: the position of each parameter tensor in `x`, in order and without gaps; by default one for all.
        moments: the optimizer state of these parameters; none for a part of the vector.
        metrics: numbers about this step by name, for logs; not saved.
        parts: the replicas that `part` has made, by name.
        progress: the step and the values recorded for it; shared by all parts.
        pending_means: the compressed means of this step that are in flight; shared by all replicas of a worker.

    Example:
        >>> import torch
        >>> from thinwire import CountingComm, Replica
        >>> x = torch.zeros(4)
        >>> r = Replica(x, torch.empty(0), CountingComm(0, 2), lr=lambda: 0.1)
        >>> r.zeros_state("momentum").add_(1.0).tolist(), list(r.state), r.lr
        ([1.0, 1.0, 1.0, 1.0], ['momentum'], 0.1)
        >>> r.part("half", slice(0, 2)).x.fill_(5.0).tolist(), x.tolist()
        ([5.0, 5.0], [5.0, 5.0, 0.0, 0.0])
    """

    active = _OfProgress[int]()
    samples = _OfProgress[float]()
    equal_start = _OfProgress[bool]()
    postponed = _OfProgress[bool]()
    loss = _OfProgress[Tensor | None]()
    metrics = _OfProgress[MutableMapping[str, float | Tensor]]()

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        comm: Comm,
        *,
        lr: Callable[[], float | Tensor],
        seed: int = 0,
        segments: Sequence[Segment] = (),
        moments: Moments | None = None,
        pending_means: PendingMeans | None = None,
    ) -> None:
        self.x = x
        self.g = g
        self.comm = comm
        self.seed = seed
        self.segments = tuple(segments) or (Segment("", 0, (x.numel(),), (1,)),)
        self.moments = moments or Moments()
        self.state: MutableMapping[str, Tensor] = {}
        self.inflight: MutableMapping[str, Work[list[Tensor]]] = {}
        self.parts: dict[str, Replica] = {}
        self.pending_means = pending_means or PendingMeans()
        self._lr = self._own_lr = lr
        self.progress = Progress(active=comm.size)
        self._ahead = 0

    @property
    def lr(self) -> float | Tensor:
        """Return the current learning rate; a vector like `x` if parameter groups have different ones."""
        return self._lr()

    def override_lr(self, lr: float | Tensor | None) -> None:
        """Use this learning rate from now on, instead of the optimizer's; None uses the optimizer's again."""
        self._lr = self._own_lr if lr is None else lambda: lr

    @property
    def step(self) -> int:
        """Return the optimizer steps done; a part adds the steps that it is ahead."""
        return self.progress.step + self._ahead

    @step.setter
    def step(self, value: int) -> None:
        self.progress.step = value - self._ahead

    def count(self, name: str) -> None:
        """Add one to a figure of `metrics`, which is a count since `attach`."""
        self.metrics[name] = self.metrics.get(name, 0.0) + 1.0

    def part(self, name: str, where: slice | None = None, *, ahead: int = 0) -> Replica:
        """Return a replica with its own names over the vectors or a slice; the same object at every call.

        It shares the vectors' memory, the step and the values recorded for it. Its state and operations in flight are
        part of this replica's, so that a checkpoint of this one holds them.

        Args:
            name: the prefix of its names in `state` and `inflight`.
            where: the slice of the vectors; by default all of them, with the optimizer state.
            ahead: added to the part's `step`.
        """
        if name in self.parts:
            return self.parts[name]

        # Read at every use, since a scheduler changes the rate between steps.
        def lr() -> float | Tensor:
            rate = self.lr
            return rate[where] if where is not None and isinstance(rate, Tensor) and rate.ndim else rate

        x, g, segments, moments = self.x, self.g, self.segments, self.moments
        if where is not None:
            where = slice(*where.indices(x.numel()))
            x, g, segments, moments = x[where], g[where], cut_out(segments, where), None
        part = Replica(x, g, self.comm, lr=lr, seed=self.seed, segments=segments, moments=moments)
        part.progress, part._ahead = self.progress, self._ahead + ahead
        part.state = PrefixView(self.state, f"{name}/")
        part.inflight = PrefixView(self.inflight, f"{name}/")
        part.pending_means = self.pending_means
        self.parts[name] = part
        return part

    def tree(self) -> Iterator[Replica]:
        """Iterate over this replica and all its parts."""
        yield self
        for part in self.parts.values():
            yield from part.tree()

    def launch(self, name: str, work: Work[list[Tensor]]) -> None:
        """Keep an operation in flight under a name, for `collect` at a later step."""
        self.inflight[name] = work

    def advance(self, name: str) -> None:
        """Start the second stage of a named operation, if it is in flight and has one; see `Work.advance`."""
        if (work := self.inflight.get(name)) is not None:
            work.advance()

    def collect(self, name: str) -> list[Tensor] | None:
        """Wait for a named operation and return its result; None if there is none."""
        work = self.inflight.pop(name, None)
        return None if work is None else work.wait()

    def record_distance(self, own: Tensor, others: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> None:
        """Estimate the consensus distance from received vectors, without additional messages.

        `metrics["consensus_distance"]` is the Euclidean distance of one worker's parameters from the mean of all. Two
        random workers are further apart by a factor of the square root of two. At most 65,536 elements are
        used, spread evenly over the vector.

        Args:
            own: this worker's vector at the time when the others were sent; older ones add distance.
            others: other workers' vectors, like it.
            weights: the push-sum weights of this worker and of the others, by which vectors are divided first.
        """
        if own.is_meta or not own.numel():
            # A dry run has no data, and a rank's part of sharded parameters may be empty.
            return
        stride = -(-own.numel() // _SAMPLE_SIZE)
        samples = [own, *others] if stride == 1 else [y[::stride] for y in (own, *others)]
        if weights:
            samples = [y / weight for y, weight in zip(samples, weights, strict=True)]
        sample = samples[0]
        # In fp64, because squares of many small differences are added.
        distances = [torch.linalg.vector_norm(y - sample, dtype=torch.float64) for y in samples[1:]]
        if distances:
            scale = own.numel() / sample.numel()
            mean = distances[0].square_() if len(distances) == 1 else torch.stack(distances).square_().mean()
            self.metrics["consensus_distance"] = mean.mul_(scale / 2).sqrt_()

    def wait_pending(self) -> None:
        """Wait for all operations in flight, so that `x` can be read; `collect` still returns results."""
        for work in self.inflight.values():
            work.wait()

    def zeros_state(self, name: str) -> Tensor:
        """Return a named state vector like `x`, which starts as zeros."""
        if name not in self.state:
            self.state[name] = torch.zeros_like(self.x)
        return self.state[name]


def as_number(value: Tensor | float, x: Tensor, name: str) -> Tensor:
    """Make a scalar fp32 tensor on the device of `x`, without autograd history.

    Args:
        value: a number or a tensor of one element.
        x: the parameters.
        name: the name of the value, for the error.

    Raises:
        ConfigError: the tensor has several elements.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigError(f"{name}: has shape {tuple(value.shape)}, but must be one number. Take its mean")
        # A copy, because the training loop may change its tensor in place.
        return value.detach().reshape(()).to(x.device, torch.float32, copy=True)
    return torch.tensor(float(value), dtype=torch.float32, device=x.device)
