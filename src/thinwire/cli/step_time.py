# SPDX-License-Identifier: Apache-2.0
"""The training step of a task's model, or of the user's, to be timed."""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.doctor.examination import TimeStep
    from thinwire.doctor.speeds import StepTime
    from thinwire.plan.meshes import LanguageModel


def step_of(
    *, task: str, model_size: str | None, model: str | None, batch_size: int | None, data: Path | None
) -> TimeStep:
    """A function that times a step; the model is made now, so that a mistake is named before anyone waits.

    Args:
        task: whose model is timed.
        model_size: a named size of it.
        model: instead of a task, module:function of the user's.
        batch_size: of the task's model; the task's own unless given.
        data: the folder of data files.

    Raises:
        ConfigError: one of them cannot be.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size}: must be at least 1")
    _check_alone(model, model_size, batch_size, data)
    import torch

    from thinwire import tasks
    from thinwire.doctor.speeds import time_steps

    if model is not None:
        module, loss = _own_model(model)
        name = model
    else:
        loaded = tasks.load(task, data=data)
        module = loaded.model(model_size, seed=0)
        size = batch_size or loaded.defaults.batch_size
        batch = loaded.batch(loaded.shards(1)[0], 0, batch_size=size, seed=0, rank=0)
        name = f"the model of {task}, batches of {size}"

        def loss() -> torch.Tensor:
            return loaded.loss(module, batch)

    def timed(budget: float) -> StepTime:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        return time_steps(name, module, optimizer, loss, budget=budget)

    return timed


def shapes_of(
    *, task: str, model_size: str | None, model: str | None, batch_size: int | None, data: Path | None
) -> StepTime:
    """The shapes of a model's trained parameters, with a step that takes no time; arguments as of `step_of`.

    Raises:
        ConfigError: one of them cannot be, or nothing in the model is trained.
    """
    _check_alone(model, model_size, batch_size, data)
    import torch

    from thinwire import tasks
    from thinwire.doctor.speeds import StepTime

    if model is not None:
        module, name = _own_model(model)[0], model
    else:
        loaded = tasks.load(task, data=data)
        with torch.device("meta"):
            module = loaded.model(model_size, seed=0)
        name = f"the model of {task}, batches of {batch_size or loaded.defaults.batch_size}"
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(f"{name}: the model has no parameters that are trained; set requires_grad")
    dtype = str(trained[0].dtype).removeprefix("torch.")
    nbytes = sum(p.numel() * p.element_size() for p in trained)
    return StepTime(name, [list(p.shape) for p in trained], dtype, nbytes, 0.0, 0.0, 0.0, [])


def language_model(
    task: str, model_size: str | None, *, batch_size: int | None, data: Path | None
) -> LanguageModel | None:
    """A task's model as one that can be split over a mesh; None if it is no language model."""
    import torch

    from thinwire import tasks
    from thinwire.plan.meshes import LanguageModel
    from thinwire.tasks.models.gpt import GPT

    loaded = tasks.load(task, data=data)

    def make() -> torch.nn.Module:
        with torch.device("meta"):
            return loaded.model(model_size, seed=0)

    made = make()
    if not isinstance(made, GPT):
        return None
    sample = loaded.batch(loaded.shards(1)[0], 0, batch_size=1, seed=0, rank=0)[0]
    return LanguageModel(
        make, batch_size or loaded.defaults.batch_size, sample.shape[-1], made.embedding.num_embeddings
    )


def _check_alone(model: str | None, model_size: str | None, batch_size: int | None, data: Path | None) -> None:
    """Refuse what belongs to a task's model beside one of the user's.

    Raises:
        ConfigError: with the option.
    """
    makes = {"batch-size": "makes the batches", "model-size": "makes the model", "data": "reads its own data"}
    for name, value in (("batch-size", batch_size), ("model-size", model_size), ("data", data)):
        if model is not None and value is not None:
            raise ConfigError(f"--{name} {value} with --model: your function {makes[name]}; leave it out")


def _own_model(place: str) -> Any:
    """A user's model and loss, from module:function."""
    module, _, name = place.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--model {place}: must be module:function of yours, such as train:make_model ({error})"
        ) from None
    try:
        signature(make).bind()
    except TypeError as error:
        raise ConfigError(
            f"--model {place}: must be a function that can be called without arguments ({error})"
        ) from None
    from torch import nn

    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        kind = type(made).__name__
        found = f"({', '.join(type(each).__name__ for each in made)})" if isinstance(made, tuple) else kind
        raise ConfigError(
            f"--model {place}: returned {found}; must return a model, as of torch.nn.Module, and a function without "
            "arguments that computes the loss of a batch"
        )
    return made
