"""Everything that decides what one run computes, and for how long."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from laconic.errors import CheckpointError, ConfigError

OPTIMIZERS = ("sgd", "adamw", "lamb", "onebit-lamb", "onebit-adam", "zero-one-adam")
SCHEDULES = ("constant", "cosine")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Settings:
    """One run. Equal settings give equal numbers, but for what a budget of seconds or a target cuts off.

    At least one of `steps`, `seconds` and `target_loss` ends the run; whichever is reached first.

    Args:
        task: its name.
        model: the named size of the task's model.
        strategy: a recipe, or the name of one of torch's own methods.
        workers: how many ranks train together.
        tensor_parallel: rows and columns of the mesh that each copy of the model is cut over, such as "2x2"; None
            leaves a whole copy to every worker.
        steps: optimizer steps.
        seconds: a budget of training time; evaluation and set-up do not count.
        target_loss: held-out loss, in nats, of the consensus model.
        batch_size: examples a step and worker.
        optimizer: one of `OPTIMIZERS`; "onebit-lamb" and "onebit-adam" can say their momenta, with
            `CompressedMomentum()`, and "zero-one-adam" with `ZeroOne()`.
        lr: the peak learning rate.
        momentum: of sgd.
        weight_decay: as the optimizer means it.
        warmup_steps: steps over which the learning rate rises to `lr`.
        schedule: "constant", or "cosine" down to a tenth of `lr` at the last step.
        split: how training data are dealt to workers.
        coreset: how each worker chooses the examples it trains on, as text; None is all of its own.
        seed: of the first parameters, the deal and the order of data.
        link: the emulated links, as text; None is the machine's own network.
        slow: which workers compute slower, as text.
        stall: which workers stall now and then, as text.
        stop: which workers are stopped for a while, as text.
        data: the folder of data files; None is LACONIC_DATA.
        device: "cpu" or "cuda".
        threads: threads of computation per worker.
        eval_every: steps between evaluations; None is about ten of them, evenly in time.
        eval_limit: held-out examples looked at; None is all.
        save_every: steps between checkpoints; None saves none.
        timeline_steps: steps whose intervals are recorded, early in the run.
        deadline_seconds: how long a worker waits for the others.
        tensorboard: write TensorBoard events too.
        command: what was typed, for the record.

    Raises:
        ConfigError: a value out of its range.
    """

    task: str
    model: str
    strategy: str
    workers: int = 1
    tensor_parallel: str | None = None
    steps: int | None = None
    seconds: float | None = None
    target_loss: float | None = None
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    split: str = "iid"
    coreset: str | None = None
    seed: int = 0
    link: str | None = None
    slow: str | None = None
    stall: str | None = None
    stop: str | None = None
    data: str | None = None
    device: str = "cpu"
    threads: int = 1
    eval_every: int | None = None
    eval_limit: int | None = 256
    save_every: int | None = None
    timeline_steps: int = 24
    deadline_seconds: float = 60.0
    tensorboard: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("workers", "batch_size", "threads"):
            _at_least(name, getattr(self, name), 1)
        for name in ("steps", "eval_every", "eval_limit", "save_every"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "timeline_steps", "seed"):
            _at_least(name, getattr(self, name), 0)
        for name in ("seconds", "target_loss", "lr", "deadline_seconds"):
            _positive(name, getattr(self, name))
        for name in ("weight_decay",):
            _at_least(name, getattr(self, name), 0)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum}: must lie in [0, 1), such as 0.9")
        parse_mesh(self.tensor_parallel, self.workers)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("device", self.device, DEVICES)
        if self.steps is None and self.seconds is None and self.target_loss is None:
            raise ConfigError("steps=None: nothing would end the run; give steps, seconds or target_loss")
        if self.schedule == "cosine" and self.steps is None:
            raise ConfigError("schedule='cosine': needs steps, to know when it ends; give steps or use 'constant'")

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """Rows and columns that a copy of the model is cut over; 1 and 1 where it is whole."""
        return parse_mesh(self.tensor_parallel, self.workers)

    @property
    def copies(self) -> int:
        """How many copies of the model train together."""
        rows, columns = self.mesh_shape
        return self.workers // (rows * columns)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.steps is None:
            return self.lr
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Settings:
        """The settings that `to_json` wrote.

        Raises:
            ConfigError: an unknown field, a missing one, or a value out of its range.
        """
        unknown = sorted(set(content) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"settings hold {unknown[0]!r}, which this version of laconic does not know")
        try:
            return cls(**content)
        except TypeError as error:
            raise ConfigError(f"settings cannot be read: {error}") from None


def parse_mesh(text: str | None, workers: int) -> tuple[int, int]:
    """Rows and columns of a text such as "2x2"; 1 and 1 of None.

    Raises:
        ConfigError: it cannot be read, or so many workers are no whole number of such meshes.
    """
    if text is None:
        return 1, 1
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip())
    if match is None:
        raise ConfigError(f"tensor_parallel={text!r}: must be ROWSxCOLUMNS, such as 2x2")
    rows, columns = int(match[1]), int(match[2])
    if workers % (rows * columns):
        raise ConfigError(
            f"tensor_parallel={text!r}: {workers} workers % {rows * columns} must be 0, because a {rows}x{columns} "
            f"mesh has {rows * columns} ranks; use {-(-workers // (rows * columns)) * rows * columns} workers"
        )
    return rows, columns


def read_settings(path: Path) -> Settings:
    """The settings in a file.

    Raises:
        CheckpointError: there is no such file, or it is not whole.
    """
    try:
        return Settings.from_json(json.loads(path.read_bytes()))
    except OSError:
        raise CheckpointError(f"{path.parent} holds no run: {path.name} is missing; give a folder of `--out`") from None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None


def _at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and not value >= least:
        raise ConfigError(f"{name}={value}: must be at least {least}")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}={value}: must be a positive number")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(known)}")
