# SPDX-License-Identifier: Apache-2.0
"""The training step of a task's model, or of the user's, to be timed."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

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
        own: the optimizer that the user's function returned; None if it returned none.
    """

    name: str
    module: nn.Module
    loss: Callable[[], Tensor]
    optimizer: MakeOptimizer
    own: Optimizer | None = None

    def timed(self, budget: float) -> StepTime:
        """Time the step within a budget of seconds."""
        from thinwire.planning.doctor.speeds import time_steps

        optimizer = self.own or self.optimizer([p for p in self.module.parameters() if p.requires_grad])
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
    """The options of a command that times the training step of a model.

    Args:
        task: whose model it is; text unless given.
        model_size: a named size of the task's model.
        own_model: instead of a task, MODULE:FUNCTION of yours that returns the model, with --data and --loss as for
            thinwire train; or one that returns the model, a function that computes the loss of a batch, and optionally
            your optimizer.
        own_loss: with --model and --data, MODULE:FUNCTION from (outputs, targets) to the mean loss.
        batch_size: examples per worker and step of the task's model; the task's own unless given.
        data: the folder of data files; that of the environment variable THINWIRE_DATA unless given. With --model,
            MODULE:FUNCTION from (rank, size, seed) to batches.
    """

    task: str | None = None
    model_size: str | None = None
    own_model: str | None = None
    own_loss: str | None = None
    batch_size: int | None = None
    data: Path | None = None

    def made(self, *, optimizer: str | None = None, meta: bool = False) -> TimedModel:
        """Make the model now, so that a mistake is named before anyone waits.

        Args:
            optimizer: sgd or adamw; unless given, the optimizer that the user's function returns, or that of the task,
                or AdamW.
            meta: whether the task's model has shapes only.

        Raises:
            ConfigError: one of the options cannot be.
        """
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: must be at least 1")
        model, data, loss = self.own_model, self.data, self.own_loss
        self._check_alone()
        if loss is not None and (model is None or data is None):
            raise ConfigError(f"--loss {loss}: goes with --model and --data. Give all three, or leave it out")
        import torch

        from thinwire.lab import tasks
        from thinwire.lab.runs.optimizer import maker_of

        if model is not None and data is None:
            module, own_loss, own = _own_model(model)
            if own is not None and optimizer is not None:
                raise ConfigError(f"--optimizer {optimizer}: {model} returns its {type(own).__name__}. Leave it out")
            maker = maker_of(optimizer or "adamw", _MOMENTUM) if own is None else _again(own, f"--model {model}")
            return TimedModel(model, module, own_loss, maker, own)
        if model is not None:
            from thinwire.lab.runs.own_functions import complete_own

            loaded, meta = complete_own({"own_model": model, "data": data, "own_loss": loss}), False
        else:
            loaded = tasks.load(self.task or "text", data=data)
        defaults = loaded.defaults
        size = self.batch_size or defaults.batch_size
        name = model or f"the model of {loaded.name}, batches of {size}"
        maker = maker_of(optimizer, _MOMENTUM) if optimizer else maker_of(defaults.optimizer, defaults.momentum)
        if meta:
            with torch.device("meta"):
                module = loaded.model(self.model_size, seed=0)
            return TimedModel(name, module, _no_loss, maker)
        module = loaded.model(self.model_size, seed=0)
        batch = loaded.batch(loaded.shards(1)[0], 0, batch_size=size, seed=0, rank=0)
        return TimedModel(name, module, lambda: loaded.loss(module, batch), maker)

    def _check_alone(self) -> None:
        """Refuse what belongs to a task's model beside one of the user's."""
        makes = {"batch-size": "makes the batches", "model-size": "makes the model", "data": "reads its own data"}
        folder = None if self.data is not None and ":" in str(self.data) else self.data
        for name, value in (("batch-size", self.batch_size), ("model-size", self.model_size), ("data", folder)):
            if self.own_model is not None and value is not None:
                raise ConfigError(f"--{name} {value} with --model: your function {makes[name]}. Leave it out")


def _no_loss() -> Tensor:
    raise AssertionError("a model of shapes is not timed")


def _again(own: Optimizer, name: str) -> MakeOptimizer:
    """Return what makes an optimizer like the user's, which plans look at and simulate with.

    Raises:
        ConfigError: it cannot be made from parameters and its defaults.
    """
    import torch

    kind = type(own)
    known = signature(kind).parameters
    settings = {key: value for key, value in own.defaults.items() if key in known}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return kind(parameters, **settings)  # pyright: ignore[reportCallIssue]

    try:
        make([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))])
    except Exception as error:
        raise ConfigError(
            f"{name}: {kind.__name__} cannot be made from parameters and its defaults ({error}). Return only the model "
            "and the loss, and give --optimizer"
        ) from None
    return make


def _own_model(place: str) -> tuple[nn.Module, Callable[[], Tensor], Optimizer | None]:
    """Return a user's model, loss and optimizer, from MODULE:FUNCTION."""
    from thinwire.lab.runs.own_functions import find_function

    make = find_function("--model", place, imports=True)
    try:
        signature(make).bind()
    except TypeError as error:
        raise ConfigError(
            f"--model {place}: must be a function that can be called without arguments ({error})"
        ) from None
    from torch import nn
    from torch.optim import Optimizer

    made: Any = make()
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    match parts:
        case (nn.Module() as module, loss) if callable(loss):
            return module, parts[1], None
        case (nn.Module() as module, loss, Optimizer() as optimizer) if callable(loss):
            return module, parts[1], optimizer
        case _:
            pass
    names = ", ".join(type(each).__name__ for each in parts)
    raise ConfigError(
        f"--model {place}: returned {f'({names})' if isinstance(made, tuple) else names}; must return a model, as of "
        "torch.nn.Module, a function without arguments that computes the loss of a batch, and, if you like, your "
        "optimizer. With --data, and --loss, it returns the model alone"
    )
