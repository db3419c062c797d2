# SPDX-License-Identifier: Apache-2.0
"""Training on a coreset: each rank selects examples of its own shard, and selects again every few epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from thinwire.coreset.baselines import Crest, El2n, Grand, KCenter, Random, Stratified
from thinwire.coreset.craig import Craig
from thinwire.coreset.policy import Points, Policy
from thinwire.coreset.sampler import CraigSampler, weighted_mean
from thinwire.coreset.schedule import Selector, seed_of
from thinwire.errors import ConfigError
from thinwire.lab.tasks import IGNORED, Batch, Shard, Task
from thinwire.lab.tasks.data.base import Stream
from thinwire.lab.tasks.data.examples import ExampleSet
from thinwire.methods.strategies.recipe import read

POLICIES: Mapping[str, type[Policy]] = {
    kind.__name__: kind for kind in (Craig, Random, Stratified, KCenter, El2n, Grand, Crest)
}


def parse_policy(text: str) -> Policy:
    """Read a policy such as "Craig(fraction=0.1, every=5)"; nothing is evaluated.

    Raises:
        ConfigError: an unknown name or argument, or a value that the policy refuses.
    """
    example = '"Craig(fraction=0.1, every=5)"'
    return read(text, Policy, what="coreset", example=example, imports=False, more=POLICIES)


def check_policy(text: str, task: Task, optimizer: str) -> str:
    """Return the canonical form of a policy that the task can be trained with.

    Raises:
        ConfigError: it cannot be read, the task has no separate examples with one class each, or the optimizer has no
            moments by which to scale gradients.
    """
    policy = parse_policy(text)
    examples_of(task)
    if isinstance(policy, Craig) and policy.preconditioned and optimizer != "adamw":
        raise ConfigError(f"coreset {text!r} with optimizer={optimizer!r}: preconditioned=True is for adamw. Use that")
    return repr(policy)


def examples_of(task: Task) -> ExampleSet:
    """Return the task's examples, to be indexed one by one.

    Raises:
        ConfigError: it has no separate examples, or they have no classes.
    """
    data = task.data
    if not isinstance(data, ExampleSet) or data.metadata.labels is None:
        raise ConfigError(
            f"coreset with task {task.name!r}: it has no separate examples with a class each to choose among. "
            "Use digits, mnist, cifar10, agnews or a9a"
        )
    return data


class ChosenData:
    """One rank's training data: the examples of its shard that a policy selects.

    A rank selects with its own model, without messages. An epoch visits every selected example once; its last batch is
    filled up with the epoch's first examples.

    Args:
        policy: how to select, and how often.
        task: with separate examples.
        shard: of this rank.
        model: of this rank, not wrapped.
        optimizer: of the model.
        batch_size: examples per step.
        seed: of the run.
        rank: of this worker.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        shard: Shard,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch_size: int,
        seed: int,
        rank: int,
    ) -> None:
        self.examples = examples_of(task)
        self.shard = shard
        self.batch_size = batch_size
        self._draws = Stream((seed, rank, 0xA06))
        labels = self.examples.metadata.labels
        assert labels is not None
        # Only of this shard: what other ranks hold is not known here.
        points = Points(self._read, torch.from_numpy(labels[shard.indices]), model, optimizer)
        self.selector = Selector(policy, points, seed=seed_of(seed, rank))
        self.sampler = CraigSampler(self.selector, seed=seed_of(seed, rank))
        self._began = 0
        self._places: Tensor | None = None

    @property
    def seconds(self) -> float:
        """Seconds spent on selection so far."""
        return self.selector.seconds

    def batch(self, step: int) -> tuple[Batch, Tensor]:
        """Return the batch of a step and the weights of its examples; call it with increasing steps."""
        places = self._epoch_of(step)
        first = (step - self._began) * self.batch_size
        chosen = places[torch.arange(first, first + self.batch_size, device="cpu") % len(places)]
        subset = self.sampler.subset
        rows = self.shard.indices[subset.indices[chosen].numpy()]
        draws = self._draws.words(step * self.batch_size, self.batch_size)
        return self.examples.train.take(rows, draws), subset.scaled[chosen].float()

    def loss(self, network: nn.Module, step: int) -> Tensor:
        """Return the weighted mean cross entropy of a step's batch, in nats."""
        (*inputs, targets), weights = self.batch(step)
        device = next(network.parameters()).device
        logits: Tensor = network(*(tensor.to(device) for tensor in inputs))
        losses = F.cross_entropy(logits, targets.to(device), ignore_index=IGNORED, reduction="none")
        return weighted_mean(losses, weights)

    def summary(self) -> dict[str, Any]:
        """Return the cost of selection, for the run's summary."""
        return {
            "coreset": repr(self.selector.policy),
            "coreset_points": len(self.sampler.subset),
            "selections": self.selector.selections,
            "selection_seconds": self.seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the model."""
        return {"began": self._began, "epoch": self.sampler.epoch, "selector": self.selector.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._began, self.sampler.epoch = state["began"], state["epoch"]
        self.selector.load_state_dict(state["selector"])
        self._places = self.sampler.places() if self.selector.began else None

    def _epoch_of(self, step: int) -> Tensor:
        """Return the order of examples in the epoch of a step; a new epoch may select again."""
        if self._places is not None and (step - self._began) * self.batch_size < len(self._places):
            return self._places
        epoch = 0 if self._places is None else self.sampler.epoch + 1
        self.sampler.set_epoch(epoch)
        self._began, self._places = step, self.sampler.places()
        return self._places

    def _read(self, rows: Tensor) -> Batch:
        """Examples of the shard without augmentation, for selection."""
        return self.examples.train.take(self.shard.indices[np.asarray(rows)])
