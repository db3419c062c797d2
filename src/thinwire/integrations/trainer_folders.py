# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face's Trainer reads, saves, counts and logs, as far as a callback can know."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.integrations.loggers import TensorBoard, WandB
from thinwire.integrations.session import FOLDER

_LOGGER = logging.getLogger("thinwire")


def count_tokens_apart(args: Any) -> None:
    """Turn off the count of all devices' tokens, by which the loss is scaled: one message and one wait a step."""
    if args.world_size > 1 and args.average_tokens_across_devices:
        _LOGGER.warning("average_tokens_across_devices is turned off: it would let workers wait at every step")
        args.average_tokens_across_devices = False


def loads_best(args: Any, state: Any) -> bool:
    """Whether the Trainer ends with the best model that it has saved."""
    return bool(args.load_best_model_at_end and state.best_model_checkpoint)


def check_search(args: Any, state: Any) -> None:
    """Refuse a hyperparameter search that saves.

    Raises:
        ConfigError: with the argument that turns saving off.
    """
    if getattr(state, "is_hyper_param_search", False) and args.save_strategy != "no":
        raise ConfigError(
            f"hyperparameter_search with save_strategy={args.save_strategy!r}: each trial saves in a folder "
            'that callbacks are not told, so that workers\' states would lie elsewhere. Set save_strategy="no"'
        )


def loaded_from(args: Any, state: Any, resume_from: str | None) -> str:
    """The checkpoint that the Trainer has loaded, of which a callback is told its contents and not its place.

    Args:
        args: the Trainer's arguments.
        state: the Trainer's state, as it was loaded.
        resume_from: what the callback was told.

    Raises:
        ConfigError: none that is known fits, or more than one.
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
    """Whether a checkpoint folder has the workers' state, and is what a Trainer's state was loaded from."""
    try:
        told = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    same = told["global_step"] == state.global_step and told["log_history"] == json.loads(json.dumps(state.log_history))
    return same and (folder / FOLDER).is_dir()


def loggers_of(args: Any) -> list[Any]:
    """TensorBoard and W&B, where the Trainer reports to them."""
    found: list[Any] = []
    names = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    if "tensorboard" in names:
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)
        found.append(TensorBoard(Path(folder or f"{args.output_dir}/runs/thinwire").expanduser()))
    if "wandb" in names:
        found.append(WandB())
    return found
