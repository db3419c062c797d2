# SPDX-License-Identifier: Apache-2.0
"""The training step of a task's model, or of the user's, to be timed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from thinwire.planning.doctor.speeds import StepTime
    from thinwire.planning.plan.traffic import MakeOptimizer

_MOMENTUM = 0.9


@dataclass(frozen=True)
class TimedModel:
    """A model whose training step can be timed.

    Attributes:
        name: in words.
        module: the model.
        loss: computes the loss of one batch.
        optimizer: makes the optimizer of the run from parameters.
    """

    name: str
    module: nn.Module
    loss: Callable[[], Tensor]
    optimizer: MakeOptimizer

    def timed(self, budget: float) -> StepTime:
        """Time the step within a budget of seconds."""
        from thinwire.planning.doctor.speeds import time_steps

        optimizer = self.optimizer([p for p in self.module.parameters() if p.requires_grad])
        return time_steps(self.name, self.module, optimizer, self.loss, budget=budget)

    def shapes(self) -> StepTime:
        """Return the shapes of the trained parameters, with a step that takes no time.

        Raises:
            ConfigError: the model has no parameters that are trained.
        """
        from thinwire.planning.doctor.speeds import StepTime

        trained = [p for p in self.module.parameters() if p.requires_grad]
        if not trained:
            raise ConfigError(f"{self.name}: the model has no parameters that are trained. Set requires_grad")
        dtype = str(trained[0].dtype).removeprefix("torch.")
        nbytes = sum(p.numel() * p.element_size() for p in trained)
        return StepTime(self.name, [list(p.shape) for p in trained], dtype, nbytes, 0.0, 0.0, 0.0, [])


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options of a command that looks at a model without training it.

    Args:
        task: whose model it is; text unless given.
        model_size: a named size of the task's model.
        own_model: instead of a task, MODULE:FUNCTION of yours that returns the model, with --data and --loss as for
            thinwire train.
        own_loss: with --model, MODULE:FUNCTION from (outputs, targets) to the mean loss; unless given, the model
            returns its loss.
        data: the folder of data files; that of the environment variable THINWIRE_DATA unless given. With --model,
            MODULE:FUNCTION from (rank, size, seed) to batches.
    """

    task: str | None = None
    model_size: str | None = None
    own_model: str | None = None
    own_loss: str | None = None
    data: Path | None = None

    def made(self, *, optimizer: str | None = None, batch_size: int | None = None, meta: bool = False) -> TimedModel:
        """Make the model now, so that a mistake is named before anyone waits.

        Args:
            optimizer: its name; that of the task unless given.
            batch_size: examples of a step of the task's model; the task's own unless given.
            meta: whether the task's model has shapes only.

        Raises:
            ConfigError: one of the options cannot be.
        """
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"--batch-size {batch_size}: must be at least 1")
        import torch

        from thinwire.lab.runs.optimizer import maker_of
        from thinwire.lab.runs.own_functions import task_of

        given = {name: getattr(self, name) for name in ("task", "own_model", "own_loss", "data")}
        loaded = task_of({**given, "model": self.model_size, "batch_size": batch_size})
        defaults, size = loaded.defaults, batch_size or loaded.defaults.batch_size
        name = self.own_model or f"{loaded.name} ({self.model_size or loaded.default_size})"
        maker = maker_of(optimizer, _MOMENTUM) if optimizer else maker_of(defaults.optimizer, defaults.momentum)
        if meta and self.own_model is None:
            with torch.device("meta"):
                module = loaded.model(self.model_size, seed=0)
            return TimedModel(name, module, _no_loss, maker)
        if self.own_model is None:
            name += f", batches of {size}"
        module = loaded.model(self.model_size, seed=0)
        batch = loaded.batch(loaded.shards(1)[0], 0, batch_size=size, seed=0, rank=0)
        return TimedModel(name, module, lambda: loaded.loss(module, batch), maker)


def _no_loss() -> Tensor:
    raise AssertionError("a model of shapes is not timed")
