"""A task: real data, models of named sizes, a loss, a measure, and settings that work."""

import hashlib
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ConfigError
from thinwire.tasks.data.base import Batch, Data, Shard
from thinwire.tasks.data.split import split_shards
from thinwire.tasks.models.base import Network, build

IGNORED = -100
"""A target that does not count: padding."""


_USUAL_RATES = {
    "sgd": 0.1,
    "adamw": 1e-3,
    "lamb": 1e-2,
    "onebit-lamb": 1e-2,
    "onebit-adam": 1e-3,
    "zero-one-adam": 1e-3,
}


@dataclass(frozen=True)
class Defaults:
    """Settings that train a task well on one worker.

    Args:
        optimizer: "sgd" (with momentum), "adamw", "lamb", "onebit-lamb", "onebit-adam" or "zero-one-adam".
        lr: learning rate, constant.
        batch_size: examples (for a language model: windows) a step and worker.
        momentum: of sgd.
        weight_decay: as the optimizer means it.
    """

    optimizer: str = "sgd"
    lr: float = 0.1
    batch_size: int = 32
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.optimizer not in _USUAL_RATES:
            raise ConfigError(f"optimizer={self.optimizer!r}: unknown; use one of {', '.join(_USUAL_RATES)}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"lr={self.lr}: must be a positive number, such as 0.1")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: must be at least 1")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum}: must be in [0, 1), such as 0.9")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"weight_decay={self.weight_decay}: must be 0 or a positive number")


@dataclass(frozen=True)
class Evaluation:
    """How well a model does on held-out data.

    Args:
        loss: mean, in nats.
        metric: the task's own measure.
        targets: bytes, words or examples it was measured on.
    """

    loss: float
    metric: float
    targets: int


@dataclass(frozen=True)
class Measure:
    """A measure of a model, from sums over held-out targets.

    Args:
        name: for people and tables.
        higher_is_better: the direction.
        of: from (summed loss in nats, targets hit, targets) to the measure.
    """

    name: str
    higher_is_better: bool
    of: Callable[[float, int, int], float]


def _share(_: float, hits: int, targets: int) -> float:
    return hits / targets


def _bits(loss: float, _: int, targets: int) -> float:
    return loss / targets / math.log(2)


ACCURACY = Measure("accuracy", True, _share)
TOKEN_ACCURACY = Measure("token_accuracy", True, _share)
BITS_PER_BYTE = Measure("bits_per_byte", False, _bits)


@dataclass(frozen=True, eq=False)
class Task:
    """Something real to learn.

    A batch is a tuple of tensors on the CPU: what the model is called with, then, last, the targets (int64, classes
    or symbols; `IGNORED` where there is none). `loss` and `evaluate` move it to the model's device.

    Args:
        name: as `load` knows it.
        title: what was loaded, in words, with what must be said when a result is quoted.
        measure: the task's own.
        networks: what makes the model of each named size, the default size first.
        data: examples.
        settings: settings for each optimizer, the default first.
    """

    name: str
    title: str
    measure: Measure
    networks: Mapping[str, Callable[[], Network]]
    data: Data
    settings: tuple[Defaults, ...]
    sizes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.networks))

    @property
    def metric(self) -> str:
        """The name of the measure."""
        return self.measure.name

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is a better one."""
        return self.measure.higher_is_better

    @property
    def default_size(self) -> str:
        """The size for a first look."""
        return self.sizes[0]

    @property
    def defaults(self) -> Defaults:
        """The settings for a first look."""
        return self.settings[0]

    def defaults_for(self, optimizer: str) -> Defaults:
        """Settings for one optimizer: the task's own where it has them.

        Raises:
            ConfigError: there is no such optimizer.
        """
        for settings in self.settings:
            if settings.optimizer == optimizer:
                return settings
        return replace(self.defaults, optimizer=optimizer, lr=_USUAL_RATES.get(optimizer, 0.1))

    def model(self, size: str | None = None, *, seed: int) -> Network:
        """A model whose parameters depend on its size and the seed alone; the global generator is not touched.

        Under `torch.device("meta")` it has shapes and no memory.

        Args:
            size: one of `sizes`; None is the default size.
            seed: of the first parameters.

        Raises:
            ConfigError: for an unknown size.
        """
        named = self.default_size if size is None else size
        if named not in self.networks:
            raise ConfigError(f"size={named!r}: task {self.name!r} has the sizes {', '.join(self.sizes)}")
        return build(self.networks[named], seed=seed)

    def shards(self, workers: int, *, split: str = "iid", seed: int = 0) -> tuple[Shard, ...]:
        """Deal the training data out, every example to exactly one worker; the deal is the same on every rank.

        Args:
            workers: how many shards.
            split: "iid", "dirichlet(ALPHA)", "label" or "group".
            seed: of the deal.

        Raises:
            ConfigError: for an unknown split, one this data does not allow, or too many workers.
        """
        return split_shards(self.data.census, workers, split=split, seed=seed)

    def batch(self, shard: Shard, step: int, *, batch_size: int, seed: int, rank: int) -> Batch:
        """The batch of one step: a pure function of its arguments, so a resumed run needs no sampler state.

        Args:
            shard: the worker's own.
            step: 0 and on.
            batch_size: examples or windows.
            seed: of the order.
            rank: so that workers with equal shards see them in orders of their own.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: must be at least 1")
        return self.data.batch(shard, step, batch_size=batch_size, seed=seed, rank=rank)

    def steps_per_epoch(self, shard: Shard, batch_size: int) -> int:
        """Steps that read as much as the shard holds."""
        return self.data.steps_per_epoch(shard, batch_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross entropy in nats, a scalar."""
        logits, targets = _answers(model, batch)
        return F.cross_entropy(logits, targets, ignore_index=IGNORED)

    def evaluate(self, model: nn.Module, *, limit: int | None = None) -> Evaluation:
        """Measure on held-out data, in evaluation mode and without gradients; every module's mode is put back.

        Args:
            model: anything that answers as the task's own models do.
            limit: held-out examples (or windows) looked at, chosen by chance but always the same; None is all.

        Raises:
            ConfigError: if the limit is below 1.
        """
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit}: an evaluation needs at least 1 example; None takes all")
        loss, hits, targets = 0.0, 0, 0
        with evaluating(model):
            for batch in self.data.held_out(limit):
                logits, wanted = _answers(model, batch)
                counted = wanted != IGNORED
                loss += float(F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum"))
                hits += int((logits.argmax(-1) == wanted)[counted].sum())
                targets += int(counted.sum())
        return Evaluation(loss / targets, self.measure.of(loss, hits, targets), targets)

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that differ when the data does, for ranks to compare before they start."""
        (everything,) = self.shards(1)
        digest = hashlib.blake2b(f"{self.title} {everything.units}".encode(), digest_size=8)
        for tensor in self.batch(everything, 0, batch_size=256, seed=0, rank=0):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Evaluation mode and inference mode; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _answers(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    device = next(model.parameters()).device
    *inputs, targets = (tensor.to(device) for tensor in batch)
    logits: Tensor = model(*inputs)
    return logits.flatten(0, -2), targets.flatten()
