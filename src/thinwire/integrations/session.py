# SPDX-License-Identifier: Apache-2.0
"""The base of all integrations: one attached model in a loop that belongs to another tool."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.core.replica.shards import is_sharded
from thinwire.core.torch_internals import compiled_module
from thinwire.errors import CheckpointError, ConfigError
from thinwire.methods.strategies.base import Strategy
from thinwire.worker.attach import attach
from thinwire.worker.checkpoint import remove_others
from thinwire.worker.worker import Worker, internals_of

FOLDER = "thinwire"
"""The subfolder for every rank's state in a checkpoint folder of another tool."""
_WRAPPERS = {"AcceleratedOptimizer": "optimizer", "LightningOptimizer": "_optimizer"}
_open: WeakValueDictionary[int, Session] = WeakValueDictionary()  # by the identity of the model


@contextmanager
def needs(package: str) -> Generator[None]:
    """Name the package to install if an import inside the block fails.

    Args:
        package: what pip installs.

    Raises:
        ModuleNotFoundError: with the command.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this needs {error.name}, which is not installed. Run: pip install '{package}'", name=error.name
        ) from error


def plain_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer in a trainer's wrapper, or in its list of one.

    Raises:
        ConfigError: there is none, or more than one.
    """
    if isinstance(optimizer, list):
        if len(optimizer) != 1:
            raise ConfigError(
                f"{len(optimizer)} optimizers: a thinwire strategy takes one here. Give it all parameters as parameter "
                "groups, or attach to each where your code makes them"
            )
        (optimizer,) = optimizer
    while type(optimizer).__name__ in _WRAPPERS:
        optimizer = getattr(optimizer, _WRAPPERS[type(optimizer).__name__])
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"the trainer's optimizer is a {type(optimizer).__name__}: must be a torch.optim.Optimizer")
    return optimizer


def plain_model(model: nn.Module) -> nn.Module:
    """Return the user's model in DistributedDataParallel and in what torch.compile returns."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (inner := compiled_module(model)) is not None:
            model = inner
        else:
            return model


def figures_of(worker: Worker) -> Callable[[], dict[str, float]]:
    """Return a function that returns a worker's bytes and waits since its last call, by names for logs."""
    before, since = worker.stats(), worker.step

    def read() -> dict[str, float]:
        nonlocal before, since
        now, steps = worker.stats(), max(1, worker.step - since)
        found = {
            "thinwire/bytes": now.payload_bytes,
            "thinwire/bytes_per_step": (now.payload_bytes - before.payload_bytes) / steps,
            "thinwire/wait_seconds_per_step": (now.wait_seconds - before.wait_seconds) / steps,
            "thinwire/evaluation_bytes": now.evaluation_bytes,
            **{f"thinwire/{name}": value for name, value in worker.metrics().items()},
        }
        before, since = now, worker.step
        return found

    return read


class Session:
    """A worker for another tool's loop: attached through its wrappers, with that tool's own events.

    Args:
        model: the tool's, perhaps inside DistributedDataParallel, whose exchange is turned off.
        optimizer: the tool's.
        strategy: the recipe.
        options: more for `attach`.
        place: the subfolder for every rank's state in the tool's checkpoint folders.
        syncs: asked before each forward pass in training whether its gradient is the last of the step, where the tool
            accumulates gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        strategy: Strategy | str,
        options: dict[str, Any],
        *,
        place: str = FOLDER,
        syncs: Callable[[], bool] | None = None,
    ) -> None:
        scaler = getattr(optimizer, "scaler", None)
        settings: dict[str, Any] = {"inside_ddp": "mute", "scaler": scaler, **options}
        self.worker: Worker = attach(plain_model(model), plain_optimizer(optimizer), strategy, **settings)
        self._place = place
        self._held = ExitStack()
        self.holding = False
        self.figures = figures_of(self.worker)
        _open[id(self.worker.model)] = self
        internals_of(self.worker).undo.callback(_open.pop, id(self.worker.model), None)
        internals_of(self.worker).undo.callback(_separate, self.worker)
        if syncs is not None:

            def follow(module: nn.Module, _: object) -> None:
                # The exchange is another one after `worker.switch`.
                backward = internals_of(self.worker).backward
                if backward is not None and module.training and torch.is_grad_enabled():
                    backward.syncing = syncs()

            internals_of(self.worker).undo.callback(self.worker.model.register_forward_pre_hook(follow).remove)

    def call_before(self, owner: Any, name: str, first: Callable[..., None]) -> None:
        """Call a function before each call of a method of the tool's, with its arguments, until the worker detaches.

        Args:
            owner: the tool's object.
            name: its method.
            first: the function.
        """
        method = getattr(owner, name)

        def both(*args: Any, **more: Any) -> Any:
            first(*args, **more)
            return method(*args, **more)

        self._replace(owner, name, both)

    def agree_in(self, owner: Any, name: str) -> None:
        """Make a method that returns the model's weights return the weights that all workers agree on.

        Args:
            owner: the tool's object; every rank must call its method.
            name: the method.
        """
        method = getattr(owner, name)

        def agreed() -> dict[str, Any]:
            held = self.holding  # inside validation, which continues
            self.hold()
            try:
                return {key: x.clone() if isinstance(x, Tensor) else x for key, x in method().items()}
            finally:
                if not held:
                    self.release()

        self._replace(owner, name, agreed)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        setattr(owner, name, function)
        internals_of(self.worker).undo.callback(vars(owner).pop, name, None)

    def hold(self) -> None:
        """Put the consensus model in place until `release`; every rank must call."""
        if not self.holding:
            self.holding = True
            self._held.enter_context(self.worker.consensus())

    def release(self) -> None:
        """Put this worker's own parameters back, where `hold` was called."""
        if self.holding:
            self.holding = False
            self._held.close()

    def save(self, folder: str | Path) -> None:
        """Write every rank's state into a checkpoint folder of the tool, in place of any that was there."""
        self.release()
        # The tool's checkpoint is one: states beside it are of what had its name before.
        remove_others(internals_of(self.worker), self.worker.save(Path(folder) / self._place, keep=None))

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint folder of the tool.

        Raises:
            CheckpointError: it was saved without thinwire, or does not fit.
        """
        try:
            self.worker.load(Path(folder) / self._place)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. The tool's own checkpoint holds the weights that workers agree on"
            ) from error

    def finish(self, *, agree: bool = True) -> None:
        """Detach, and leave the parameters that all workers agree on in the model; every rank must call.

        If other ranks do not answer, the model is detached too, so that it can be attached again.

        Args:
            agree: False keeps the parameters that the tool has loaded, such as those of the best checkpoint.
        """
        model = self.worker.model
        try:
            if agree:
                self.release()
                self.hold()
            # What was loaded while the consensus was held would be undone with it.
            kept = [x.detach().clone() for x in (*model.parameters(), *model.buffers())]
            self.release()
            with torch.no_grad():
                for x, y in zip((*model.parameters(), *model.buffers()), kept, strict=True):
                    x.copy_(y)
            self.worker.detach()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """End after an error, without waiting for other workers, which may have failed too."""
        self.release()
        for replica in self.worker.replicas:
            for part in replica.tree():
                self.worker.comm.close_mailbox(part)
        internals_of(self.worker).undo.close()


def _separate(worker: Worker) -> None:
    """Give each parameter its own memory again: some tools take parameters of one vector for tied ones."""
    with suppress(torch.OutOfMemoryError):  # they can be used as they are
        for parameters, _ in internals_of(worker).layouts:
            for parameter in parameters:
                if not is_sharded(parameter):
                    parameter.data = parameter.data.clone()


def abandon_open(model: nn.Module) -> None:
    """End the session of an earlier training of this model that an error ended without a call of `abandon`."""
    session = _open.get(id(plain_model(model)))
    if session is not None:
        session.abandon()
