# SPDX-License-Identifier: Apache-2.0
"""A task made of a user's own functions: a model, batches, and a loss.

    model() -> nn.Module
    data(rank, size, seed) -> batches, or a tuple (batches, held_out)
    loss(outputs, targets) -> Tensor

`batches` is whatever a loop can go through: a DataLoader, a list, a generator. A batch is a tuple of tensors, the
arguments of the model and then the targets; without a loss, the model is called with all of the batch (a dict: by
keywords) and returns the loss, or something that has it as `loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.core.torch_internals import pytree
from thinwire.errors import ConfigError
from thinwire.lab.tasks.base import ACCURACY, IGNORED, CrossEntropy, Defaults, Measure, Task
from thinwire.lab.tasks.data.base import Batch, ExampleMetadata, Shard, Stream

# Without held-out batches, so many of rank 0's training batches are evaluated.
_EVALUATED = 8
_END = object()
LOSS = Measure("loss", False, lambda loss, _, targets: loss / targets)


@dataclass(frozen=True)
class OwnFunctions:
    """A user's functions, and the names that errors call them by.

    Args:
        model: makes the model.
        data: from (rank, size, seed) to batches.
        loss: from outputs and targets to the mean loss; None if the model returns it.
        model_name: such as "train:model".
        data_name: likewise.
        loss_name: likewise.
    """

    model: Callable[[], Any]
    data: Callable[[int, int, int], Any]
    loss: Callable[[Any, Any], Any] | None = None
    model_name: str = "model"
    data_name: str = "data"
    loss_name: str | None = None


def own_task(functions: OwnFunctions, *, size: int, seed: int = 0) -> Task:
    """Return the task of a user's functions.

    Args:
        functions: the model, the data and the loss.
        size: the number of workers, each of which has batches of its own.
        seed: given to the user's data function.

    Example:
        >>> rows = torch.eye(4)
        >>> own = OwnFunctions(lambda: nn.Linear(4, 1), lambda rank, size, seed: [(rows, rows[:, :1])], F.mse_loss)
        >>> task = own_task(own, size=2)
        >>> task.loss(task.model(seed=0), task.batch(task.shards(2)[0], 0, batch_size=4, seed=0, rank=0)).shape
        torch.Size([])
    """
    objective = OwnObjective(functions)
    return Task(
        name=functions.model_name,
        title=f"{functions.model_name} on {functions.data_name}",
        measure=ACCURACY if objective.counts_hits else LOSS,
        networks={"own": functions.model},
        data=OwnData(functions, size, seed, objective),
        settings=(Defaults("adamw", 1e-3, 1), Defaults("sgd", 0.05, 1)),
        objective=objective,
        build=lambda network, *, seed: _build(network, functions.model_name, seed),
        divided=True,
    )


def check_own(task: Task, *, seed: int) -> int:
    """Make the model, take rank 0's first batch and compute its loss; returns the number of examples in the batch.

    Torch's global generator is left as it was.

    Raises:
        ConfigError: a function is missing, raises, or returns what cannot be used.
    """
    with torch.random.fork_rng(devices=[]):
        model = task.model(seed=seed)
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"--model {task.name}: the model has no parameter that requires a gradient")
        batch = task.batch(task.shards(1)[0], 0, batch_size=1, seed=seed, rank=0)
        loss = task.loss(model, batch)
    if not loss.requires_grad:
        raise ConfigError(
            f"--model {task.name}: the loss of the first batch has no gradient. Return it without detach() or item()"
        )
    return task.objective.count(batch)


def _build(network: Callable[[], Any], name: str, seed: int) -> nn.Module:
    """Return the model, its initial parameters a function of the seed; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        try:
            made = network()
        except Exception as error:
            raise ConfigError(f"--model {name}: calling it failed: {_said(error)}") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"--model {name}: returned {_kind(made)}. It must return an nn.Module")
    return made


class OwnObjective(CrossEntropy):
    """The user's loss, or that of the model.

    Args:
        functions: the user's.
    """

    def __init__(self, functions: OwnFunctions) -> None:
        self.functions = functions
        self.where = f"--data {functions.data_name}"
        """What an error about the present batch begins with."""

    @property
    def counts_hits(self) -> bool:
        """Return True if the metric is the accuracy: with torch's cross entropy."""
        loss = self.functions.loss
        return loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)

    def apply(self, model: nn.Module, batch: Batch) -> tuple[Any, Any]:
        """Return the model's outputs and the targets; without a loss function all of the batch is the model's."""
        device = next(model.parameters()).device
        whole: Any = pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, cast(Any, batch))
        inputs, targets = (whole, None) if self.functions.loss is None else (whole[:-1], whole[-1])
        try:
            return (model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)), targets
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"{self.where} gave {_looks(batch)}, which --model {self.functions.model_name} does not take: "
                f"{_said(error)}"
            ) from error

    def loss(self, outputs: Any, targets: Any, reduction: str = "mean") -> Tensor:
        """Return the mean loss, a scalar, whatever the reduction."""
        function, name = self.functions.loss, f"--loss {self.functions.loss_name}"
        if function is None:
            name = f"--model {self.functions.model_name}"
            found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
        else:
            try:
                found = function(outputs, targets)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise ConfigError(
                    f"{name}: cannot compare outputs {_looks(outputs)} with targets {_looks(targets)} of "
                    f"{self.where}: {_said(error)}"
                ) from error
        if not isinstance(found, Tensor) or found.dim():
            hint = "; without --loss the model must return its loss" if function is None else ""
            raise ConfigError(f"{name}: the loss of a batch is {_looks(found)}. It must be a scalar tensor{hint}")
        return found

    def total(self, outputs: Any, targets: Any, count: int) -> Tensor:
        """Return the mean loss times the number of examples."""
        return self.loss(outputs, targets) * count

    def hits(self, outputs: Any, targets: Any, count: int) -> Tensor:
        """Correct predictions: the share of a batch's targets that are right, times its examples; 0 without classes.

        An example may have several targets, of which those that the loss ignores do not count. Where targets are
        probabilities, the largest is the right one.
        """
        if not self.counts_hits:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        # The classes are the second size, or the only one.
        classes = min(1, outputs.dim() - 1)
        if targets.is_floating_point():
            targets = targets.argmax(classes)
        counted = targets != getattr(self.functions.loss, "ignore_index", IGNORED)
        right = ((outputs.argmax(classes) == targets) & counted).sum()
        return right.double() * count / counted.sum().clamp(min=1)

    def count(self, batch: Batch) -> int:
        """Return the number of examples: the first size of the first tensor."""
        found = [leaf for leaf in pytree.tree_leaves(cast(Any, batch)) if isinstance(leaf, Tensor)]
        return int(found[0].shape[0]) if found and found[0].dim() else 1


class OwnData:
    """The user's batches: a stream for each worker.

    Torch's global generator is seeded by (seed, rank, pass) before each pass over the data, and by (seed, rank, step)
    before each batch, so that shuffling and dropout repeat; a resumed run goes through the batches before its step.

    Args:
        functions: the user's.
        size: the number of workers.
        seed: of the order of the data.
        objective: is told where the present batch is from.
    """

    def __init__(self, functions: OwnFunctions, size: int, seed: int, objective: OwnObjective) -> None:
        self._functions, self._size, self._seed, self._objective = functions, size, seed, objective
        self._streams: dict[int, _Batches] = {}
        self._held_out: Iterable[Any] | None = None

    @property
    def metadata(self) -> ExampleMetadata:
        """One entry for each worker's stream."""
        return ExampleMetadata(np.ones(self._size, np.int64), minimum=1, unit="streams of batches")

    def batch(self, shard: Shard, step: int, *, batch_size: int, seed: int, rank: int) -> Batch:
        """Return the batch of one step of one rank; its size and the seed are the user's functions' own."""
        self._objective.where = f"rank {rank}, step {step}: --data {self._functions.data_name}"
        return self._stream(rank).at(step)

    def steps_per_epoch(self, shard: Shard, batch_size: int) -> int:
        """Return the number of batches, if the user's object has a length; otherwise 1."""
        return max((stream.length for stream in self._streams.values()), default=1)

    def held_out(self, limit: int | None) -> Iterator[Batch]:
        """Yield the held-out batches; without any, the first training batches of rank 0."""
        batches: Any = self._held_out
        if batches is None:
            stream = self._stream(0)
            found: Any = stream.held_out
            if found is None:
                found = list(stream.first(_EVALUATED))
            # What can be read only once is kept.
            self._held_out = batches = list(found) if iter(found) is found else found
        seen = 0
        for number, batch in enumerate(batches):
            if limit is not None and seen >= limit:
                return
            self._objective.where = f"held-out batch {number}: --data {self._functions.data_name}"
            checked = _as_batch(batch, self._objective)
            seen += self._objective.count(checked)
            yield checked
        if not seen:
            raise ConfigError(_no_held_out(f"--data {self._functions.data_name}"))

    def _stream(self, rank: int) -> _Batches:
        if rank not in self._streams:
            self._streams[rank] = _Batches(self._functions, rank, self._size, self._seed, self._objective)
        return self._streams[rank]


class _Batches:
    """One rank's batches, in order, pass after pass."""

    def __init__(self, functions: OwnFunctions, rank: int, size: int, seed: int, objective: OwnObjective) -> None:
        self._functions, self._rank, self._size, self._seed = functions, rank, size, seed
        self._name, self._objective = f"--data {functions.data_name}", objective
        self._train, self.held_out = self._call()
        self._pass, self._next, self._fresh = 0, 0, True
        self._iterator: Iterator[Any] = iter(())

    @property
    def length(self) -> int:
        """Batches in one pass; 0 where it is not known."""
        return _length(self._train) or 0

    def at(self, step: int) -> Batch:
        """Return the batch of a step; going back begins again."""
        if step < self._next or self._next == 0:
            # A loader may have a generator of its own, which every pass moves on: only lists skip passes.
            number = step // self.length if isinstance(self._train, list | tuple) and self.length else 0
            self._begin(number)
            self._next = number * self.length
        while self._next < step:
            self._take()
        return _as_batch(self._take(), self._objective)

    def first(self, count: int) -> Iterator[Batch]:
        """Yield the first batches, from a stream of their own."""
        train, _ = self._call()
        for _, batch in zip(range(count), train, strict=False):
            yield _as_batch(batch, self._objective)

    def _call(self) -> tuple[Any, Any]:
        """Return the training batches, and the held-out ones or None."""
        arguments = f"rank={self._rank}, size={self._size}, seed={self._seed}"
        torch.manual_seed(_key(self._seed, self._rank, 0, 0))
        try:
            found: Any = self._functions.data(self._rank, self._size, self._seed)
        except Exception as error:
            raise ConfigError(f"{self._name}: calling it with {arguments} failed: {_said(error)}") from error
        train, held_out = found if _is_pair(found) else (found, None)
        for what, batches in (("training", train), ("held-out", held_out)):
            if batches is not None and (
                isinstance(batches, Tensor | Mapping | str) or not hasattr(batches, "__iter__")
            ):
                raise ConfigError(
                    f"{self._name}: its {what} batches are {_looks(batches)}. Return a DataLoader, a list or a "
                    "generator of batches, or a tuple (training batches, held-out batches)"
                )
        if train is None:
            raise ConfigError(f"{self._name}: returned None. Return the training batches")
        if _length(held_out) == 0:
            raise ConfigError(_no_held_out(self._name))
        return train, held_out

    def _begin(self, number: int) -> None:
        """Begin a pass over the data."""
        self._pass, self._fresh = number, True
        torch.manual_seed(_key(self._seed, self._rank, number, 1))
        self._iterator = iter(self._train)
        if self._iterator is self._train and (number or self._next):
            # A generator cannot be gone through again.
            self._train, _ = self._call()
            self._iterator = iter(self._train)

    def _take(self) -> Any:
        torch.manual_seed(_key(self._seed, self._rank, self._next, 2))
        found = next(self._iterator, _END)
        if found is _END:
            if self._fresh:
                raise ConfigError(f"rank {self._rank}: {self._name} has no batch for this rank. Use fewer workers")
            self._begin(self._pass + 1)
            return self._take()
        self._fresh = False
        self._next += 1
        return found


def _as_batch(found: Any, objective: OwnObjective) -> Batch:
    """Return a batch as a tuple, or a dict for a model that returns its loss."""
    loss, where = objective.functions.loss, objective.where
    if isinstance(found, Mapping) and loss is None:
        return cast(Any, dict(cast(Any, found)))
    batch = tuple(cast(Any, found)) if isinstance(found, tuple | list) else (found,)
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(batch)):
        raise ConfigError(f"{where} gave {_looks(found)}. A batch is a tuple of tensors, such as (inputs, targets)")
    if loss is not None and (len(batch) < 2 or isinstance(found, Mapping)):
        raise ConfigError(
            f"{where} gave {_looks(found)}; with --loss a batch is a tuple of the model's arguments and then the "
            "targets. Leave out --loss for a model that returns its loss"
        )
    return cast(Any, batch)


def _is_pair(found: object) -> bool:
    """Return True if this is (training batches, held-out batches), and not batches."""
    return isinstance(found, tuple) and len(found) == 2 and not any(isinstance(x, Tensor) for x in found)


def _length(batches: Any) -> int | None:
    """Return how many batches there are; None where it is not known."""
    try:
        return len(batches)
    except TypeError:
        return None


def _no_held_out(name: str) -> str:
    return (
        f"{name}: its held-out batches are empty. Return at least one (a DataLoader with drop_last drops a short one), "
        "or the training batches alone"
    )


def _key(*numbers: int) -> int:
    return int(Stream(numbers).words(0, 1)[0] >> np.uint64(1))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _looks(value: object) -> str:
    """Return a value in words, for errors: tensors by their shapes."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict of " + (", ".join(f"{key!r}: {_looks(x)}" for key, x in value.items())[:300] or "nothing")
    if isinstance(value, tuple | list):
        parts = ", ".join(_looks(each) for each in value[:4])
        return f"a {type(value).__name__} of ({parts}{', ...' if len(value) > 4 else ''})"
    return _kind(value)
