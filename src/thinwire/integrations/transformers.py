# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer: `Trainer(..., callbacks=[Callback("DiLoCo(period=32)")])`."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.integrations.loggers import TensorBoard, WandB
from thinwire.integrations.session import FOLDER, Session, abandon_open, needs
from thinwire.methods.strategies.base import Strategy

with needs("transformers[torch]"):
    from accelerate.state import GradientState
    from transformers import TrainerCallback

_LOGGER = logging.getLogger("thinwire")


class Callback(TrainerCallback):
    """Train a Trainer's model with a strategy.

    The exchange of DistributedDataParallel, in which the Trainer puts the model, is turned off. The Trainer evaluates
    and saves the model that all workers agree on. The checkpoint folder also holds every rank's own state, from which
    `train(resume_from_checkpoint=...)` resumes bit for bit. After training the model is the one that all agree on.
    Bytes and waits are added to the logs: to `state.log_history`, and to TensorBoard and W&B if `report_to` names them.

    Put it last in the list of callbacks. If a callback behind it asks for an evaluation or a checkpoint, it raises
    `ConfigError`.

    Args:
        strategy: the recipe, as an object or as text.
        resume_from: the checkpoint folder, if `train(resume_from_checkpoint=...)` names one outside `output_dir`.
        options: more for `attach`, such as `seed` or `nonfinite`.
    """

    def __init__(self, strategy: Strategy | str, *, resume_from: str | None = None, **options: Any) -> None:
        self.strategy = strategy
        self.resume_from = resume_from
        self.options = options
        self.session: Session | None = None
        self._loggers: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Attach, and continue from the checkpoint that the Trainer has loaded."""
        _count_tokens_apart(args)
        if self.session is not None:
            self.session.abandon()
        abandon_open(more["model"])  # of a training that an error has ended, perhaps with another callback
        _check_search(args, state)
        syncs = GradientState()
        self.session = Session(
            more["model"], more["optimizer"], self.strategy, self.options, syncs=lambda: bool(syncs.sync_gradients)
        )
        if state.global_step > 0:
            self.session.load(loaded_from(args, state, self.resume_from))
        if getattr(args, "eval_on_start", False):
            self.session.hold()
        self._loggers = _loggers_of(args) if state.is_world_process_zero else []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Put the model that all workers agree on in place, if the Trainer is about to evaluate or save."""
        if self.session is not None and (control.should_evaluate or control.should_save):
            # Until the next step: whether to save may depend on the evaluation.
            self.session.hold()

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save every rank's own state next to the Trainer's."""
        if self.session is not None:
            self._check_agreed("a checkpoint")
            self.session.save(f"{args.output_dir}/checkpoint-{state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Refuse an evaluation of this worker's own parameters."""
        if self.session is not None:
            self._check_agreed("an evaluation")

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Continue training with the worker's own parameters, whatever other callbacks did."""
        if self.session is not None:
            self.session.release()

    on_epoch_begin = on_step_begin

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        """Add bytes and waits."""
        if self.session is not None and "train_runtime" in (logs or {}) and not _loads_best(args, state):
            # The last record: callbacks in front may save or upload the model when training ends.
            self.session.hold()
        if self.session is None or logs is None or "loss" not in logs:
            return
        figures = self.session.figures()
        if state.log_history:
            state.log_history[-1].update(figures)
        for logger in self._loggers:
            logger.log(figures, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Leave the model that all workers agree on, or the best one if the Trainer has loaded it."""
        if self.session is not None:
            self.session.finish(agree=not (self.session.holding or _loads_best(args, state)))
            self.session = None
        for logger in self._loggers:
            if isinstance(logger, TensorBoard):
                logger.close()
        self._loggers = []

    def _check_agreed(self, what: str) -> None:
        if self.session is not None and not self.session.holding:
            raise ConfigError(
                f"a callback behind thinwire's asked for {what}, which got the parameters of one worker and not those "
                "that all agree on. Put thinwire's Callback last in the list of callbacks. A callback that called for "
                "it directly must set control.should_evaluate or control.should_save instead, in on_step_end"
            )


def _count_tokens_apart(args: Any) -> None:
    """Turn off the count of all devices' tokens that scales the loss: it costs a message and a wait per step."""
    if args.world_size > 1 and args.average_tokens_across_devices:
        _LOGGER.warning("average_tokens_across_devices is turned off: it would let workers wait at every step")
        args.average_tokens_across_devices = False


def _loads_best(args: Any, state: Any) -> bool:
    """Return True if the Trainer ends with the best model that it has saved."""
    return bool(args.load_best_model_at_end and state.best_model_checkpoint)


def _check_search(args: Any, state: Any) -> None:
    """Refuse a hyperparameter search that saves.

    Raises:
        ConfigError: with the argument that turns saving off.
    """
    if getattr(state, "is_hyper_param_search", False) and args.save_strategy != "no":
        raise ConfigError(
            f"hyperparameter_search with save_strategy={args.save_strategy!r}: each trial saves in a folder "
            'whose path callbacks do not get, so workers\' states would be saved elsewhere. Set save_strategy="no"'
        )


def loaded_from(args: Any, state: Any, resume_from: str | None) -> str:
    """Return the folder of the checkpoint that the Trainer has loaded: callbacks get its contents, not its path.

    Args:
        args: the Trainer's arguments.
        state: the Trainer's state, as it was loaded.
        resume_from: the callback's argument.

    Raises:
        ConfigError: no known folder fits, or more than one does.
    """
    given, step = args.resume_from_checkpoint, state.global_step
    named = [resume_from, given if isinstance(given, str) else None, f"{args.output_dir}/checkpoint-{step}"]
    fits = {os.path.realpath(each): each for each in named if each and _is_of(Path(each), state)}
    if resume_from in fits.values():
        return str(resume_from)
    if len(fits) == 1:
        return next(iter(fits.values()))
    raise ConfigError(
        f"the Trainer resumes at step {step}, and "
        + (f"{' and '.join(fits.values())} both fit" if fits else f"{named[-1]} holds no state of the workers there")
        + ". Pass Callback(..., resume_from=folder), the folder that train(resume_from_checkpoint=...) was given"
    )


def _is_of(folder: Path, state: Any) -> bool:
    """Return True if a checkpoint folder has the workers' state, and is what a Trainer's state was loaded from."""
    try:
        told = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    same = told["global_step"] == state.global_step and told["log_history"] == json.loads(json.dumps(state.log_history))
    return same and (folder / FOLDER).is_dir()


def _loggers_of(args: Any) -> list[Any]:
    """TensorBoard and W&B, where the Trainer reports to them."""
    found: list[Any] = []
    names = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    if "tensorboard" in names:
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)
        found.append(TensorBoard(Path(folder or f"{args.output_dir}/runs/thinwire").expanduser()))
    if "wandb" in names:
        found.append(WandB())
    return found
