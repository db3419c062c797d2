"""A rank trains on chosen points of its own shard: which, when they are chosen anew, and what that takes."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
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
from thinwire.tasks import IGNORED, Batch, Shard, Task
from thinwire.tasks.data.base import Stream
from thinwire.tasks.data.examples import ExampleSet

POLICIES: Mapping[str, type[Policy]] = {
    kind.__name__: kind for kind in (Craig, Random, Stratified, KCenter, El2n, Grand, Crest)
}
_EXAMPLE = 'write it like "Craig(fraction=0.1, every=5)"'


def parse_policy(text: str) -> Policy:
    """The policy that a text names, as in "Craig(fraction=0.1, every=5)"; nothing is evaluated.

    Raises:
        ConfigError: an unknown name or argument, something that is no literal, or a value that the policy refuses.
    """
    name, arguments = _call(text)
    if name not in POLICIES:
        close = get_close_matches(name.lower(), [known.lower() for known in POLICIES], n=1, cutoff=0.5)
        meant = next((f"; did you mean {known}?" for known in POLICIES if [known.lower()] == close), "")
        raise ConfigError(f"coreset {text!r}: {name!r} is unknown{meant} (known: {', '.join(POLICIES)})")
    known = [field.name for field in fields(POLICIES[name])]
    unknown = next((each for each in arguments if each not in known), None)
    if unknown is not None:
        raise ConfigError(f"coreset {text!r}: {name} has no {unknown!r} (known: {', '.join(known)})")
    return POLICIES[name](**arguments)


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """A name and its arguments, which are named literals."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    raise ConfigError(f"coreset {text[:100]!r}: cannot be read; {_EXAMPLE}")


def check_policy(text: str, task: Task) -> str:
    """The canonical form of a policy that the task can be trained with.

    Raises:
        ConfigError: it cannot be read, or the task has no separate examples with one class each.
    """
    policy = parse_policy(text)
    examples_of(task)
    return repr(policy)


def examples_of(task: Task) -> ExampleSet:
    """The task's examples, which can be taken by number.

    Raises:
        ConfigError: it has none, or they have no classes.
    """
    data = task.data
    if not isinstance(data, ExampleSet) or data.census.labels is None:
        raise ConfigError(
            f"coreset with task {task.name!r}: it has no separate examples with a class each to choose among; "
            "use digits, mnist, cifar10, agnews or a9a"
        )
    return data


class ChosenData:
    """One rank's training data, cut down to what a policy chooses of its shard.

    A rank chooses by the model that it holds itself, and says nothing to the others. An epoch is one visit of every
    chosen point; its last batch is filled up with the epoch's first points.

    Args:
        policy: how to choose, and how often.
        task: with separate examples.
        shard: this rank's own.
        model: the rank's own, not wrapped.
        optimizer: of the model.
        batch_size: examples a step.
        seed: of the run.
        rank: this one.
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
        labels = self.examples.census.labels
        assert labels is not None
        points = Points(self._read, torch.from_numpy(labels[shard.indices]), model, optimizer)
        self.selector = Selector(policy, points, seed=seed_of(seed, rank))
        self.sampler = CraigSampler(self.selector, seed=seed_of(seed, rank))
        self._began = 0
        self._places: Tensor | None = None

    @property
    def seconds(self) -> float:
        """Spent on choosing so far."""
        return self.selector.seconds

    def batch(self, step: int) -> tuple[Batch, Tensor]:
        """The batch of a step and the weights of its examples; steps are asked for in their order."""
        places = self._epoch_of(step)
        first = (step - self._began) * self.batch_size
        chosen = places[torch.arange(first, first + self.batch_size) % len(places)]
        subset = self.sampler.subset
        rows = self.shard.indices[subset.indices[chosen].numpy()]
        draws = self._draws.words(step * self.batch_size, self.batch_size)
        return self.examples.train.take(rows, draws), subset.scaled[chosen].float()

    def loss(self, network: nn.Module, step: int) -> Tensor:
        """The weighted mean cross entropy of a step's batch, in nats."""
        (*inputs, targets), weights = self.batch(step)
        device = next(network.parameters()).device
        logits: Tensor = network(*(tensor.to(device) for tensor in inputs))
        losses = F.cross_entropy(logits, targets.to(device), ignore_index=IGNORED, reduction="none")
        return weighted_mean(losses, weights)

    def summary(self) -> dict[str, Any]:
        """What choosing took, for the run's summary."""
        return {
            "coreset": repr(self.selector.policy),
            "coreset_points": len(self.sampler.subset),
            "selections": self.selector.selections,
            "selection_seconds": self.seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the model."""
        return {"began": self._began, "epoch": self.sampler.epoch, "selector": self.selector.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._began, self.sampler.epoch = state["began"], state["epoch"]
        self.selector.load_state_dict(state["selector"])
        self._places = self.sampler.places() if self.selector.began else None

    def _epoch_of(self, step: int) -> Tensor:
        """The places of the epoch that a step belongs to; a new epoch may choose anew."""
        if self._places is not None and (step - self._began) * self.batch_size < len(self._places):
            return self._places
        epoch = 0 if self._places is None else self.sampler.epoch + 1
        self.sampler.set_epoch(epoch)
        self._began, self._places = step, self.sampler.places()
        return self._places

    def _read(self, rows: Tensor) -> Batch:
        """Examples of the shard as they are: no draws, so no augmentation."""
        return self.examples.train.take(self.shard.indices[np.asarray(rows)])
