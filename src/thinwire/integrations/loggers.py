# SPDX-License-Identifier: Apache-2.0
"""Bytes and waits of a run as curves: TensorBoard, Weights & Biases, or any object that takes a dict of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from thinwire.core.storage.files import local_path
from thinwire.core.validation import check_range
from thinwire.errors import ConfigError
from thinwire.integrations.session import figures_of, needs
from thinwire.worker.worker import Worker, internals_of


class Logger(Protocol):
    """An object that records figures."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures, by name, at a step."""
        ...


class TensorBoard:
    """Figures as TensorBoard events.

    Args:
        folder: for the event files.
    """

    def __init__(self, folder: str | Path) -> None:
        with needs("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(local_path(folder)))

    def log(self, figures: Mapping[str, float], step: int, *, flush: bool = True) -> None:
        """Record figures, by name, at a step; without `flush` a reader may see them later."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        if flush:
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """Figures in a run of Weights & Biases.

    Args:
        run: from `wandb.init`; None is the open one.
    """

    def __init__(self, run: Any = None) -> None:
        with needs("wandb"):
            import wandb

        self._run: Any = wandb.run if run is None else run
        if self._run is None:
            raise ConfigError('WandB(): no run is open. Call wandb.init(mode="online" or "offline") first')

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures by name, and the step as `thinwire/step`, since the run counts its own steps."""
        self._run.log({**figures, "thinwire/step": step})


def log_to(worker: Worker, logger: Logger, *, every: int = 10) -> None:
    """Record bytes, waits and the strategy's metrics from the next step on, until `worker.detach()`.

    Call it on the ranks whose figures are wanted, mostly rank 0.

    Args:
        worker: from `attach`.
        logger: anything with a method `log(figures, step)`.
        every: steps from one record to the next.

    Raises:
        ConfigError: `every` is less than 1.

    Example:
        >>> import torch, thinwire
        >>> from thinwire.integrations.loggers import log_to
        >>> class Printer:
        ...     def log(self, figures, step):
        ...         print(step, sorted(figures))
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> worker = thinwire.attach(model, optimizer, "LocalSGD(period=2)")
        >>> log_to(worker, Printer(), every=2)
        >>> for _ in range(2):
        ...     model(torch.ones(2)).sum().backward()
        ...     optimizer.step()
        2 ['thinwire/bytes', 'thinwire/bytes_per_step', 'thinwire/evaluation_bytes', 'thinwire/wait_seconds_per_step']
    """
    check_range("every", every, "1..", "10 is usual")
    read = figures_of(worker)

    last = worker.step

    def after_step(*_: object) -> None:
        nonlocal last
        # Of a class that calls its base's step, that of the base ends before the worker's own.
        if worker.step != last and worker.step % every == 0:
            logger.log(read(), worker.step)
        last = worker.step

    # After the worker's own hook, which has counted the step.
    internals_of(worker).undo.callback(worker.optimizer.register_step_post_hook(after_step).remove)
