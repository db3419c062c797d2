# SPDX-License-Identifier: Apache-2.0
"""A task: real data, models of named sizes, a loss, a metric, and optimizer settings that work."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.core.modes import evaluation_mode
from thinwire.errors import ConfigError
from thinwire.lab.tasks.data.base import Batch, Data, Shard
from thinwire.lab.tasks.data.split import split_shards
from thinwire.lab.tasks.models.base import build

__all__ = ["IGNORED", "Defaults", "Evaluation", "Measure", "Task"]

IGNORED = -100
"""The target of padding, which counts neither in the loss nor in the metric."""
# Learning rates for tasks that have no settings of their own for an optimizer.
_USUAL_RATES = {
    "sgd": 0.1,
    "adamw": 1e-3,
    "lamb": 1e-2,
    "onebit-lamb": 1e-2,
    "onebit-adam": 1e-3,
    "zero-one-adam": 1e-3,
}


@dataclass(frozen=True)
class Defaults:
    """Optimizer settings that train a task well on one worker.

    Args:
        optimizer: "sgd" (with momentum), "adamw", "lamb", "onebit-lamb", "onebit-adam" or "zero-one-adam".
        lr: learning rate, constant.
        batch_size: examples per step and worker; for a language model, windows of text.
        momentum: momentum of sgd.
        weight_decay: weight decay, as the optimizer defines it.
    """

    optimizer: str = "sgd"
    lr: float = 0.1
    batch_size: int = 32
    momentum: float = 0.9
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """A model's results on held-out data.

    Args:
        loss: mean loss in nats.
        metric: the task's own metric.
        targets: how many bytes, words or examples both were measured on.
    """

    loss: float
    metric: float
    targets: int


@dataclass(frozen=True)
class Measure:
    """A metric of a model, computed from sums over held-out targets.

    Args:
        name: as tables show it.
        higher_is_better: the direction.
        of: from (summed loss in nats, correct predictions, targets) to the metric.
    """

    name: str
    higher_is_better: bool
    of: Callable[[float, float, int], float]


ACCURACY = Measure("accuracy", True, lambda _, hits, targets: hits / targets)
BITS_PER_BYTE = Measure("bits_per_byte", False, lambda loss, _, targets: loss / targets / math.log(2))


class CrossEntropy:
    """The loss of a task: the mean cross entropy in nats over targets that are not `IGNORED`."""

    def apply(self, model: nn.Module, batch: Batch) -> tuple[Any, Any]:
        """Call the model on a batch, on its device; returns the logits, [..., classes], and the targets, [...]."""
        device = next(model.parameters()).device
        *inputs, targets = (tensor.to(device) for tensor in batch)
        return model(*inputs), targets

    def loss(self, outputs: Any, targets: Any, reduction: str = "mean") -> Tensor:
        """Return the mean loss of a batch, or the sum, a scalar."""
        # Flattened to one row per target.
        logits, classes = outputs.flatten(0, -2), targets.flatten()
        return F.cross_entropy(logits, classes, ignore_index=IGNORED, reduction=reduction)

    def total(self, outputs: Any, targets: Any, count: int) -> Tensor:
        """Return the sum of the losses of a batch's `count` targets, a scalar."""
        return self.loss(outputs, targets, "sum")

    def hits(self, outputs: Any, targets: Any, count: int) -> Tensor:
        """How many of a batch's `count` targets have the largest logit, a scalar; 0 where the metric does not ask."""
        return ((outputs.argmax(-1) == targets) & (targets != IGNORED)).sum()

    def count(self, batch: Batch) -> int:
        """Return how many targets of a batch the loss is a mean over: those that are not `IGNORED`."""
        return int((batch[-1] != IGNORED).sum())


@dataclass(frozen=True, eq=False)
class Task:
    """A data set with models of named sizes, a loss, a metric and optimizer settings.

    A batch is a tuple of tensors on the CPU: the arguments of the model, then the targets (int64 classes or symbols;
    `IGNORED` for padding). `loss` and `evaluate` move it to the model's device.

    Args:
        name: its name for `load`.
        title: what was loaded, in words, with everything that belongs to a quoted result.
        measure: the task's metric.
        networks: by size, a function that makes the model; the default size first.
        data: the examples.
        settings: settings for each optimizer, the default first.
        objective: the loss; cross entropy unless another is given.
        build: makes a network from one of the functions and a seed.
        divided: whether the data come as one stream of ready batches for each worker, and not as numbered examples.

    Example:
        >>> from thinwire.lab import tasks
        >>> task = tasks.load("digits")
        >>> shard = task.shards(2)[0]
        >>> pixels, labels = task.batch(shard, step=0, batch_size=32, seed=0, rank=0)
        >>> pixels.shape, labels.shape
        (torch.Size([32, 1, 8, 8]), torch.Size([32]))
        >>> model = task.model(seed=0)
        >>> task.evaluate(model).targets
        359
    """

    name: str
    title: str
    measure: Measure
    networks: Mapping[str, Callable[[], Any]]
    data: Data
    settings: tuple[Defaults, ...]
    objective: CrossEntropy = field(default_factory=CrossEntropy)
    build: Callable[..., nn.Module] = build
    divided: bool = False
    sizes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.networks))

    @property
    def metric(self) -> str:
        """The name of the metric."""
        return self.measure.name

    @property
    def higher_is_better(self) -> bool:
        """Return True if a larger metric is a better one."""
        return self.measure.higher_is_better

    @property
    def default_size(self) -> str:
        """The size of the model unless another one is chosen."""
        return self.sizes[0]

    @property
    def defaults(self) -> Defaults:
        """The optimizer settings unless others are chosen."""
        return self.settings[0]

    def defaults_for(self, optimizer: str) -> Defaults:
        """Settings for one optimizer: the task's own if it has them, otherwise its default ones with a usual rate."""
        for settings in self.settings:
            if settings.optimizer == optimizer:
                return settings
        return replace(self.defaults, optimizer=optimizer, lr=_USUAL_RATES.get(optimizer, 0.1))

    def model(self, size: str | None = None, *, seed: int) -> nn.Module:
        """Return a model whose parameters depend on its size and the seed alone; the global generator is not used.

        Under `torch.device("meta")` it has shapes and no memory.

        Args:
            size: one of `sizes`; None is the default size.
            seed: seed of the initial parameters.

        Raises:
            ConfigError: for an unknown size.
        """
        named = self.default_size if size is None else size
        if named not in self.networks:
            raise ConfigError(f"size={named!r}: must be one of {', '.join(self.sizes)} for task {self.name!r}")
        return self.build(self.networks[named], seed=seed)

    def shards(self, workers: int, *, split: str = "iid", seed: int = 0) -> tuple[Shard, ...]:
        """Split the training data among workers: every example goes to exactly one, and all ranks get the same split.

        Args:
            workers: how many shards.
            split: "iid", "dirichlet(ALPHA)", "label" or "group".
            seed: seed of the split.

        Raises:
            ConfigError: for an unknown split, one that this data does not allow, or too many workers.
        """
        return split_shards(self.data.metadata, workers, split=split, seed=seed)

    def batch(self, shard: Shard, step: int, *, batch_size: int, seed: int, rank: int) -> Batch:
        """Return the batch of one step: a pure function of its arguments, so a resumed run needs no sampler state.

        Args:
            shard: the worker's own.
            step: counted from 0.
            batch_size: examples, or windows of text.
            seed: seed of the order.
            rank: of the worker; workers with equal shards draw in different orders.

        Raises:
            ConfigError: a batch size below 1.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: must be at least 1")
        return self.data.batch(shard, step, batch_size=batch_size, seed=seed, rank=rank)

    def steps_per_epoch(self, shard: Shard, batch_size: int) -> int:
        """Return how many steps read as much data as the shard has."""
        return self.data.steps_per_epoch(shard, batch_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, a scalar; cross entropy in nats unless the task has another objective."""
        return self.objective.loss(*self.objective.apply(model, batch))

    def evaluate(self, model: nn.Module, *, limit: int | None = None) -> Evaluation:
        """Evaluate on held-out data, in evaluation mode and without gradients; every module's mode is restored.

        Args:
            model: a module that is called like the task's own models.
            limit: how many held-out examples or windows to use, a random sample that is always the same; None is all.

        Raises:
            ConfigError: if the limit is below 1.
        """
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit}: an evaluation needs at least 1 example; None takes all")
        loss, hits, targets = 0.0, 0.0, 0
        with evaluation_mode(model), torch.inference_mode():
            for batch in self.data.held_out(limit):
                outputs, expected = self.objective.apply(model, batch)
                count = self.objective.count(batch)
                loss += float(self.objective.total(outputs, expected, count))
                hits += float(self.objective.hits(outputs, expected, count))
                targets += count
        return Evaluation(loss / targets, self.measure.of(loss, hits, targets), targets)

    def fingerprint(self) -> str:
        """Return a hash of the data, 16 hexadecimal digits, which ranks compare before they start.

        Of data that are `divided` it is a hash of their names: no rank has another's batches.
        """
        if self.divided:
            return hashlib.blake2b(self.title.encode(), digest_size=8).hexdigest()
        (everything,) = self.shards(1)
        digest = hashlib.blake2b(f"{self.title} {everything.units}".encode(), digest_size=8)
        for tensor in self.batch(everything, 0, batch_size=256, seed=0, rank=0):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()
