# SPDX-License-Identifier: Apache-2.0
"""Lightning: `Trainer(strategy=Strategy("DiLoCo(period=32)"))`, or a callback with a strategy of your own."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from shutil import rmtree
from typing import Any

from thinwire.integrations.session import Session, needs, plain_optimizer
from thinwire.methods.strategies.base import Strategy as Recipe
from thinwire.worker.checkpoint import gathered
from thinwire.worker.worker import internals_of

with needs("lightning"):
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy


class Callback(pl.Callback):
    """Train a module with a thinwire strategy; the Trainer's own strategy stays, with its exchange turned off.

    Validation and checkpoints use the model that all workers agree on. Next to each checkpoint `x.ckpt`, the folder
    `x.ckpt.workers` holds every rank's own state, and `fit(ckpt_path=...)` resumes from it bit for bit. After `fit` the
    module is the model that all agree on. Bytes and waits go to the Trainer's loggers.

    Args:
        strategy: the recipe, as an object or as text.
        options: more for `thinwire.attach`, such as `seed` or `nonfinite`.
    """

    def __init__(self, strategy: Recipe | str, **options: Any) -> None:
        self.strategy = strategy
        self.options = options
        self.session: Session | None = None
        self._logged = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the optimizer, and let checkpoints hold every rank's state."""
        options = {"scaler": getattr(trainer.precision_plugin, "scaler", None), **self.options}
        self.session = session = Session(pl_module, plain_optimizer(trainer.optimizers), self.strategy, options)
        self._logged = trainer.global_step
        session.agree_in(trainer.strategy, "lightning_module_state_dict")

        def finish() -> None:
            # After the last checkpoint, and before the module leaves its device.
            self.session = None
            session.finish()

        WorkerFolders(session, trainer.strategy)
        session.call_before(trainer.strategy, "teardown", finish)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the workers' state if `fit` was given a checkpoint."""
        if self.session is not None and trainer.ckpt_path is not None:
            self.session.load(f"{os.path.realpath(trainer.ckpt_path)}.workers")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Send gradients in the last of the batches that a step accumulates."""
        backward = None if self.session is None else internals_of(self.session.worker).backward
        if backward is not None:
            backward.syncing = not trainer.fit_loop.epoch_loop._should_accumulate()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate the model that all workers agree on."""
        if self.session is not None:
            self.session.hold()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Continue training with this worker's own parameters."""
        if self.session is not None:
            self.session.release()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log bytes and waits as often as the Trainer logs."""
        step, every = trainer.global_step, trainer.log_every_n_steps  # 0 is never, as with barebones=True
        due = every > 0 and step % every == 0 and step != self._logged  # a step may have several batches
        if self.session is not None and trainer.loggers and due:
            self._logged = step
            figures = self.session.figures()
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach without waiting for other workers, which may have failed too."""
        if self.session is not None:
            self.session.abandon()
            self.session = None


class Strategy(DDPStrategy):
    """A Lightning strategy: `DDPStrategy` without DistributedDataParallel, with a thinwire strategy in its place.

    It does what `Callback` does, and needs no callback.

    Args:
        strategy: the recipe, as an object or as text.
        options: more for `thinwire.attach`; give `DDPStrategy`'s own arguments, such as `process_group_backend`, as
            the dict `ddp`.
    """

    def __init__(self, strategy: Recipe | str, *, ddp: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**(ddp or {}))
        self.callback = Callback(strategy, **options)

    def setup(self, trainer: Any) -> None:
        """Add the callback to the Trainer's."""
        if self.callback not in trainer.callbacks:
            # First, so that checkpoints are saved when validation has given the parameters back.
            trainer.callbacks.insert(0, self.callback)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Leave the module unchanged: the thinwire strategy exchanges its gradients."""

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Do nothing: the worker itself knows which gradients are a step's last."""
        yield


class WorkerFolders:
    """Keep a folder `x.ckpt.workers` next to each checkpoint `x.ckpt` of a Lightning strategy.

    A name may contain metrics, which differ between ranks unless Lightning averages them. All ranks use the name of
    rank 0, which also sends the names of removed checkpoints. The others, which may have their own disks, remove theirs
    at the next save.

    Args:
        session: of the training; its end restores the strategy's methods.
        strategy: Lightning's.
    """

    def __init__(self, session: Session, strategy: Any) -> None:
        self._session = session
        self._removed: list[str] = []
        session.call_before(strategy, "save_checkpoint", self._save)
        session.call_before(strategy, "remove_checkpoint", self._remove)

    def _save(self, checkpoint: Any, filepath: Any, *_: Any, **__: Any) -> None:
        told = gathered(internals_of(self._session.worker), {"path": str(filepath), "removed": self._removed})[0]
        self._removed.clear()
        for path in told["removed"]:
            _remove_folder(path)
        self._session.save(f"{told['path']}.workers")

    def _remove(self, filepath: Any) -> None:
        self._removed.append(str(filepath))
        if self._session.worker.comm.rank == 0:
            _remove_folder(filepath)


def _remove_folder(filepath: Any) -> None:
    rmtree(f"{filepath}.workers", ignore_errors=True)
