# SPDX-License-Identifier: Apache-2.0
"""The settings of a run: everything that determines what it computes, and for how long."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from thinwire.core.validation import check_ranges
from thinwire.errors import CheckpointError, ConfigError

OptimizerName = Literal["sgd", "adamw", "lamb", "onebit-lamb", "onebit-adam", "zero-one-adam"]
Schedule = Literal["constant", "cosine"]
Device = Literal["cpu", "cuda"]
NonFinite = Literal["raise", "skip", "ignore"]
OnNotice = Literal["save", "leave"]


MOST_WORKERS = 4096
"""Data sets, graphs and links of more workers than this cannot be looked at before the start."""
MOST_THREADS = 4096
MOST_SEED = 2**32 - 1
_COUNTS = dict.fromkeys(("batch_size", "steps", "eval_every", "eval_limit", "save_every", "keep"), ("1..", "Use more"))
_POSITIVE = dict.fromkeys(["seconds", "target_loss", "lr", "timeout"], ("(0, inf)", "Use a value such as 0.1"))
_RANGES = {
    "workers": (f"1..{MOST_WORKERS}", "4 is usual"),
    "threads": (f"1..{MOST_THREADS}", "Use the number of cores"),
    "seed": (f"0..{MOST_SEED}", "Use 0"),
    "restarts": ("1..", "Leave it out to start no worker again"),
    "warmup_steps": ("0..", "Use 0 for none"),
    "timeline_steps": ("0..", "Use 0 for none"),
    "weight_decay": ("[0, inf)", "Use 0 for none"),
    "momentum": ("[0, 1)", "0.9 is usual"),
    **_COUNTS,
    **_POSITIVE,
}
CONFIG_FILE = "run.toml"
"""The file in which a command saves the options that it ran with."""
OPTION_NAMES = {"model": "model-size", "own_model": "model", "own_loss": "loss"}
"""The fields of `Settings` whose options have other names."""


@dataclass(frozen=True)
class Settings:
    """The settings of one run; equal settings give equal numbers, as far as `seconds` or `target_loss` let it run.

    At least one of `steps`, `seconds` and `target_loss` must be given; the first one reached ends the run. The fields
    are also options of the command line, with the texts below as their help (`thinwire.cli.options`); "unless given"
    describes what `resolve` fills in. Here `eval_every=None` evaluates about ten times, evenly in time, and
    `eval_limit=None` takes all held-out examples.

    Args:
        task: text, digits, mnist, cifar10, shakespeare, wikitext2, agnews or a9a; text unless given.
        model: a named size of the task's model; the task's default unless given.
        own_model: instead of a task, MODULE:FUNCTION of yours, such as train:model; called without arguments, it
            returns the model. Needs --data.
        own_loss: with a model of yours, MODULE:FUNCTION from (outputs, targets) to the mean loss, such as
            torch.nn.functional:cross_entropy; the model returns its loss unless given.
        strategy: a recipe such as "LocalSGD(period=8, codec=Quantize(4))", or one of torch's own methods: ddp,
            ddp+bf16, ddp+powersgd, post-local-sgd; AllReduce() unless given.
        switch: strategies that take over on the way, STEP: RECIPE, separated by semicolons, such as
            "200: SlowMo(period=12)"; none unless given.
        workers: number of processes that train together; 4 unless given.
        tensor_parallel: rows and columns of the mesh of workers over which each copy of a language model is split, such
            as 2x2; twice as many workers train two copies. A whole copy on every worker unless given.
            The model is then of the first size that the mesh divides, unless one is named.
        steps: optimizer steps; 200 unless given, or seconds or target_loss are.
        seconds: a budget of training time; set-up and evaluation do not count. 900 where target_loss alone is given, as
            it may never be reached.
        target_loss: stop when the held-out loss of the consensus model, in nats, is no more than this.
        batch_size: examples per step and worker; the task's default unless given.
        optimizer: sgd, adamw or lamb; onebit-lamb and onebit-adam, whose momentum CompressedMomentum() can compress;
            zero-one-adam, for ZeroOne(). The task's default unless given.
        lr: the peak learning rate; the task's default for the optimizer unless given.
        momentum: momentum of sgd; the task's default unless given.
        weight_decay: weight decay, as the optimizer defines it; the task's default unless given.
        warmup_steps: steps over which the learning rate rises to its peak; 0 unless given.
        schedule: learning rate after warmup: constant, or cosine down to a tenth of the peak at the last step; constant
            unless given.
        nonfinite: what to do where a loss or gradient is NaN or infinite: raise ends the run, skip leaves that step
            out, and ignore continues; raise unless given.
        split: how training data are divided among workers: iid, dirichlet(ALPHA), label or group; iid unless given.
        coreset: how each worker chooses the examples it trains on, such as "Craig(fraction=0.1, every=5)", or Random,
            Stratified, KCenter, El2n, Grand or Crest; choosing them counts as training time. All of them unless given.
        seed: seed of the initial parameters, of the division of the data and of their order; 0 unless given.
        link: emulated links, [RANK:]RATE[+DELAY], separated by commas, such as 100mbit or 1gbit+5ms,0:10mbit. The
            machine's own network unless given.
        slow: workers that compute slower, [RANK:]FACTORx, such as 2:3x.
        stall: workers that pause in random steps, [RANK:]PROBABILITY:DURATION, such as 0.15:200ms.
        data: the folder of data files; that of the environment variable THINWIRE_DATA unless given. With a model of
            yours, MODULE:FUNCTION from (rank, size, seed) to that worker's batches, or to batches and held-out batches.
        device: cpu or cuda; cpu unless given.
        threads: threads of computation per worker; OMP_NUM_THREADS, or the cores divided among the workers,
            unless given.
        eval_every: steps between evaluations; about ten evaluations in a run unless given.
        eval_limit: held-out examples per evaluation; 256 unless given.
        save_every: steps between checkpoints; none are saved unless given.
        keep: how many checkpoints to keep, the newest ones; older ones are removed. 3 unless given.
        timeline_steps: number of early steps whose time intervals are recorded.
        timeout: seconds that a worker waits for the others; a minute, or more with slow links or workers,
            unless given.
        elastic: continue when a worker is lost. Such a run ends after steps, and every epoch's batches are assigned to
            the workers that are left.
        on_notice: what to do on SIGTERM or SIGUSR1, by which schedulers and spot machines announce the end: save makes
            all workers save after the same step and ends the run with exit code 75, so that --resume continues; leave,
            with elastic, lets the worker that got the signal leave, and the others continue. Unless given, a signal
            ends the run at once.
        restarts: with elastic, how many times workers that were killed are started again, all together; they join the
            others. 0 unless given.
        late: with elastic, close rounds without late workers, whose work counts in a later round: late, or options of
            LateMerging such as "late(quorum=0.5)"; --elastic late is short for --elastic --late late. Off unless given.
        tensorboard: write TensorBoard events too.
        command: the command line that started the run.

    Raises:
        ConfigError: a value out of its range.
    """

    task: str
    model: str
    strategy: str
    switch: str | None = None
    workers: int = 1
    tensor_parallel: str | None = None
    steps: int | None = None
    seconds: float | None = None
    target_loss: float | None = None
    batch_size: int = 32
    optimizer: OptimizerName = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    nonfinite: NonFinite = "raise"
    split: str = "iid"
    coreset: str | None = None
    seed: int = 0
    link: str | None = None
    slow: str | None = None
    stall: str | None = None
    data: str | None = None
    device: Device = "cpu"
    threads: int = 1
    eval_every: int | None = None
    eval_limit: int | None = 256
    save_every: int | None = None
    keep: int = 3
    timeline_steps: int = 24
    timeout: float = 60.0
    elastic: bool = False
    on_notice: OnNotice | None = None
    restarts: int | None = None
    late: str | None = None
    tensorboard: bool = False
    own_model: str | None = None
    own_loss: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self, **_RANGES)
        parse_mesh(self.tensor_parallel, self.workers)
        kinds = {"optimizer": OptimizerName, "schedule": Schedule, "device": Device, "nonfinite": NonFinite}
        if self.on_notice is not None:
            kinds["on_notice"] = OnNotice
        for name, known in kinds.items():
            if getattr(self, name) not in get_args(known):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(get_args(known))}")
        if self.switch is not None and self.tensor_parallel is not None:
            raise ConfigError(f"switch={self.switch!r} with tensor_parallel: only whole copies switch. Leave out one")
        if self.steps is None and self.seconds is None and self.target_loss is None:
            raise ConfigError("steps=None: nothing would end the run. Give steps, seconds or target_loss")
        if self.elastic:
            _check_elastic(self)
        elif self.restarts is not None:
            raise ConfigError(f"restarts={self.restarts}: only elastic runs take killed workers in again. Add elastic")
        elif self.late is not None:
            raise ConfigError(f"late={self.late!r}: only elastic runs close rounds without late workers. Add elastic")
        elif self.on_notice == "leave":
            raise ConfigError(
                "on_notice='leave': only elastic runs continue without a worker. Add elastic, or use 'save'"
            )
        if self.schedule == "cosine" and self.steps is None:
            raise ConfigError("schedule='cosine': needs steps, to know when it ends. Give steps or use 'constant'")

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """Rows and columns of the mesh over which a copy of the model is split; 1 and 1 without a mesh."""
        return parse_mesh(self.tensor_parallel, self.workers)

    @property
    def copies(self) -> int:
        """Number of copies of the model that train together."""
        rows, columns = self.mesh_shape
        return self.workers // (rows * columns)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.steps is None:
            return self.lr
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Settings:
        """Read what `to_json` returned.

        Raises:
            ConfigError: an unknown field, a missing one, or a value out of its range.
        """
        # Options that an earlier version had, and that were not given, decide nothing.
        known = {field.name for field in fields(cls)}
        unknown = sorted(name for name, value in content.items() if name not in known and value is not None)
        if unknown:
            raise ConfigError(f"settings hold {unknown[0]!r}, which this version of thinwire does not know")
        try:
            return cls(**{name: value for name, value in content.items() if name in known})
        except TypeError as error:
            raise ConfigError(f"settings cannot be read: {error}") from None


def parse_mesh(text: str | None, workers: int) -> tuple[int, int]:
    """Rows and columns from a text such as "2x2"; 1 and 1 for None.

    Raises:
        ConfigError: it cannot be read, or the number of workers is not a multiple of the mesh's.
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
            f"mesh has {rows * columns} ranks. Use {-(-workers // (rows * columns)) * rows * columns} workers"
        )
    return rows, columns


def read_settings(path: Path) -> Settings:
    """Read the settings from a file.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    try:
        return Settings.from_json(json.loads(path.read_bytes()))
    except OSError:
        raise CheckpointError(f"{path.parent} holds no run: {path.name} is missing. Give a folder of `--out`") from None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None


_INELASTIC = {
    "switch": "a worker could be lost in the change",
    "tensor_parallel": "every worker must hold the whole model",
    "seconds": "workers have clocks of their own. Use steps",
    "target_loss": "workers have clocks of their own. Use steps",
    "coreset": "it is chosen from a worker's own share of the data",
    "link": "the store of the workers lies outside the emulated network",
    "save_every": "checkpoints are of a fixed number of workers",
}


def _check_elastic(settings: Settings) -> None:
    """Refuse what an elastic run does not have."""
    for name, reason in _INELASTIC.items():
        saves_alone = name == "save_every" and settings.late is not None
        if getattr(settings, name) is not None and not saves_alone:
            raise ConfigError(f"{name}={getattr(settings, name)!r} with elastic: {reason}. Leave out one of them")
    if settings.on_notice == "save":
        raise ConfigError("on_notice='save' with elastic: checkpoints are of a fixed number of workers. Use 'leave'")
    if settings.device != "cpu" or settings.split != "iid":
        name = "split" if settings.device == "cpu" else "device"
        raise ConfigError(
            f"{name}={getattr(settings, name)!r} with elastic: batches of one data set are assigned to workers on the "
            f"CPU. Use {'iid' if name == 'split' else 'cpu'}"
        )


# -- options of a command as TOML: what `--config` reads, and what every run saves in its folder -----------------------


def option_name(field: str) -> str:
    """Return the option of a field of `Settings`, without the dashes in front."""
    return OPTION_NAMES.get(field, field).replace("_", "-")


def without_decided(settings: Settings) -> dict[str, Any]:
    """Return the fields of settings that can be given again: without those that a user's functions or others decide."""
    decided = () if settings.own_model is None else ("task", "model", "batch_size")
    if settings.optimizer != "sgd":
        decided = (*decided, "momentum")
    return {name: value for name, value in settings.to_json().items() if name not in decided}


def settings_as_toml(settings: Settings) -> str:
    """Return the settings as options of `thinwire train`."""
    left_out = ("command", "timeline_steps")
    values = {option_name(name): x for name, x in without_decided(settings).items() if name not in left_out}
    return as_toml(values, head=f"thinwire train --config {CONFIG_FILE} repeats this run")


def as_toml(values: Mapping[str, Any], *, head: str) -> str:
    """Options as TOML; those that are None are left out.

    Args:
        values: text, paths, numbers, booleans and None, by the names of the options.
        head: a comment for the first line.

    Example:
        >>> print(as_toml({"task": "text", "lr": 0.1, "steps": None}, head="an example"), end="")
        # an example
        task = "text"
        lr = 0.1
    """
    rows = ((name, str(x) if isinstance(x, Path) else x) for name, x in values.items() if x is not None)
    return "\n".join([f"# {head}", *(f"{name} = {_value(x)}" for name, x in rows)]) + "\n"


def _value(x: Any) -> str:
    """A value in TOML, whose strings are JSON's, but for DEL and characters that JSON would escape in two halves."""
    text = json.dumps(x, ensure_ascii=False).replace("\x7f", "\\u007f")
    try:
        text.encode()
    except UnicodeEncodeError:  # of a path that is no text; no TOML can have it
        return json.dumps(x)
    return text
