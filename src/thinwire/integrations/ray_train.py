# SPDX-License-Identifier: Apache-2.0
"""Ray Train: `TorchTrainer(loop, torch_config=Config("DiLoCo(period=32)"))`, with `attach` and `report` in the loop."""

# Ray is too large to be installed only so that types can be checked.
# pyright: reportUntypedBaseClass=false, reportGeneralTypeIssues=false

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from thinwire.errors import ConfigError
from thinwire.integrations.session import Session, needs
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.recipe import parse
from thinwire.registry import canonical
from thinwire.worker.worker import Worker, internals_of

with needs("ray[train]"):
    import ray.train
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig

_RECIPE = "THINWIRE_RAY_STRATEGY"
_sessions: dict[int, Session] = {}


def _set_recipe(text: str) -> None:
    os.environ[_RECIPE] = text


@dataclass
class Config(TorchConfig):
    """Ray's `TorchConfig`, which also gives every worker the strategy for `attach` in the training loop.

    Args:
        strategy: the recipe, as an object or as text; a wrong one is refused here, before workers start.
    """

    strategy: Strategy | str = ""

    def __init__(self, strategy: Strategy | str, **torch_config: Any) -> None:
        super().__init__(**torch_config)
        self.strategy = canonical(parse(strategy) if isinstance(strategy, str) else strategy)

    @property
    def backend_cls(self) -> Any:
        """Ray's own backend for torch, after which every worker knows the strategy."""
        own: type[Backend] = super().backend_cls

        class _Backend(own):
            def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
                super().on_training_start(worker_group, backend_config)
                worker_group.execute(_set_recipe, backend_config.strategy)

        return _Backend


def attach(model: nn.Module, optimizer: Any, strategy: Strategy | str | None = None, **options: Any) -> Worker:
    """Train a model with the strategy of `Config` in a loop of Ray Train, from Ray's checkpoint if there is one.

    The exchange of DistributedDataParallel, in which `ray.train.torch.prepare_model` puts the model, is turned off.

    Args:
        model: the plain one, or what `prepare_model` returned.
        optimizer: the plain one, or what `prepare_optimizer` returned.
        strategy: the recipe; None is that of `Config`.
        options: more for `thinwire.attach`.

    Raises:
        ConfigError: no strategy is given, here or in `Config`; else as `thinwire.attach` does.
        CheckpointError: the checkpoint does not fit.
    """
    recipe = strategy or os.environ.get(_RECIPE, "")
    if not recipe:
        raise ConfigError('no strategy: pass TorchTrainer(..., torch_config=Config("DiLoCo(period=32)"))')
    session = Session(model, optimizer, recipe, options)
    _sessions[id(session.worker)] = session
    internals_of(session.worker).undo.callback(_sessions.pop, id(session.worker), None)
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            session.load(folder)
    return session.worker


def report(worker: Worker, metrics: Mapping[str, Any], *, save: bool = True) -> None:
    """Call `ray.train.report` with bytes and waits, and with a checkpoint of all workers; every rank must call.

    The checkpoint holds every rank's own state, and `model.safetensors` with the weights that all agree on.

    Args:
        worker: from `attach`.
        metrics: the loop's own.
        save: whether to save a checkpoint.

    Raises:
        ConfigError: the worker is not from `attach`, or is detached.
        CheckpointError: it cannot be written.
    """
    session = _sessions.get(id(worker))
    if session is None:
        raise ConfigError("report: the worker is not from ray_train.attach, or is detached. Report before detach()")
    figures = {**metrics, **session.figures(), "thinwire/step": worker.step}
    if not save:
        ray.train.report(figures)
        return
    with TemporaryDirectory() as folder:
        session.save(folder)
        worker.export(Path(folder) / "model.safetensors")
        Path(folder, "thinwire.json").write_text(json.dumps({"strategy": canonical(worker.strategy)}))
        ray.train.report(figures, checkpoint=ray.train.Checkpoint.from_directory(folder))
