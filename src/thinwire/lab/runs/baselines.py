# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own methods of data-parallel training, as baselines in the same loop.

PyTorch does not count bytes, so payload is computed: what a bandwidth-optimal all-reduce or broadcast sends per rank,
for the tensors that each method exchanges. Exposed time is the tail of the backward pass, from this rank's last
gradient to the end of the pass, plus the averaging of parameters where a method has one. That includes unpacking what
was received: measured both ways on one run of AllReduce, it is half a percent more than the time blocked in waits,
which is how thinwire's strategies are measured. The broadcast of BatchNorm buffers in the forward pass counts as
computation.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Interval
from thinwire.core.replica.flat import copy_each_, flatten, lay_out, views
from thinwire.core.validation import check_fields
from thinwire.errors import ConfigError, PeerLostError
from thinwire.lab.runs.engine import ThinwireEngine

_LOST = re.compile(r"gloo|nccl|connection|socket|timed? ?out|peer|recv|process group", re.IGNORECASE)


class GradientClock:
    """Times the tail of a backward pass: from the moment the last local gradient is final to the end of the pass.

    In it a rank waits for other ranks' gradients, and unpacks them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.last = 0.0
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._record_time)

    def tail(self, loss: Tensor) -> tuple[float, float]:
        """Run the backward pass; returns the start and end of its tail, in seconds of `time.perf_counter`."""
        loss.backward()
        end = time.perf_counter()
        return min(self.last, end), end

    def _record_time(self, _: Tensor) -> None:
        self.last = time.perf_counter()


class BaselineEngine:
    """A model under DistributedDataParallel and one of its hooks.

    Attributes:
        average: averages the parameters after a step, where the method does; set by `Baseline.prepare`.
        payload_per_step: bytes that every step sends; other payload is counted as it is sent.
        share: of a tensor, that a rank sends in a broadcast, and twice in an all-reduce.
    """

    def __init__(self, network: DistributedDataParallel, optimizer: Optimizer, control: Comm) -> None:
        self.network = network
        self.optimizer = optimizer
        self.control = control
        self.step = 0
        self.payload_bytes = 0.0
        self.exposed_seconds = 0.0
        self.intervals: list[Interval] = []
        self.average: Callable[[], None] | None = None
        self.payload_per_step = 0.0
        self.share = (control.size - 1) / control.size
        buffers = sum(b.nbytes for b in network.module.buffers())
        if buffers and control.size > 1:
            network.register_forward_pre_hook(lambda *_: self._count_broadcast(buffers))
        self._clock = GradientClock(p for p in network.parameters() if p.requires_grad)
        self._tracing = False

    def register(self, state: object, hook: Callable[[Any, GradBucket], Future[Tensor]]) -> None:
        """Exchange gradients by a hook."""
        # DDP checks the annotations by identity, and those of this module are strings.
        hook.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}
        self.network.register_comm_hook(state, hook)

    def count_all_reduce(self, nbytes: int) -> None:
        """Count an all-reduce of a tensor of `nbytes`."""
        self.payload_bytes += 2 * self.share * nbytes

    def _count_broadcast(self, nbytes: int) -> None:
        """Count the broadcast of rank 0's buffers, which DDP does before each forward pass in training."""
        if self.network.training and torch.is_grad_enabled():
            self.payload_bytes += self.share * nbytes

    def backward(self, loss: Tensor) -> None:
        """Compute and exchange the gradients.

        Raises:
            PeerLostError: a connection was closed, or another rank did not answer in time.
        """
        try:
            start, end = self._clock.tail(loss)
        except RuntimeError as error:
            self.raise_lost("all-reduce of gradients", error)
        self.record_wait("gradients", start, end)

    def update(self) -> None:
        """The optimizer's step, and an average of parameters where the method has one.

        Raises:
            PeerLostError: a connection was closed, or another rank did not answer in time.
        """
        try:
            self.optimizer.step()
            if self.average is not None:
                self.average()
        except RuntimeError as error:
            self.raise_lost("average of parameters", error)
        self.optimizer.zero_grad(set_to_none=True)
        self.payload_bytes += self.payload_per_step
        self.step += 1

    def record_wait(self, name: str, start: float, end: float) -> None:
        """Count a wait, from `start` to `end`."""
        self.exposed_seconds += end - start
        if self._tracing:
            self.intervals.append(Interval("wait", name, start, end, self.step))

    def wait_pending(self) -> None:
        """Do nothing: no message is in flight between steps."""

    def metrics(self) -> dict[str, float]:
        """Return nothing: PyTorch's methods measure nothing."""
        return {}

    def trace(self, on: bool) -> None:
        """Switch the recording of waits on or off."""
        self._tracing = on

    @contextmanager
    def consensus(self) -> Generator[nn.Module]:
        """The model, which all ranks share, or the mean of their models where they differ."""
        module: nn.Module = self.network.module
        parameters = [p.detach() for p in module.parameters()]
        layout = lay_out([("", p) for p in parameters])
        own = flatten(parameters, layout)
        # Only methods that average parameters let them differ between ranks.
        if self.average is not None:
            mean = self.control.all_reduce_(own.clone()).wait().div_(self.control.size)
            copy_each_(parameters, views(mean, layout))
        try:
            yield module
        finally:
            copy_each_(parameters, views(own, layout))

    def save(self, folder: Path, extra: dict[str, Any], *, keep: int) -> NoReturn:
        """Refuse: baselines are not saved.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("save_every: PyTorch's own methods are baselines and cannot be saved. Use a recipe")

    def load(self, folder: Path) -> NoReturn:
        """Refuse: baselines are not saved.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("resume: PyTorch's own methods are baselines and cannot be saved. Use a recipe")

    def raise_lost(self, what: str, error: RuntimeError) -> NoReturn:
        """Raise a PeerLostError for the error of a failed collective; raise any other error as it is."""
        if not _LOST.search(str(error)):
            raise error
        rank, first = self.control.rank, str(error).splitlines()[0].rpartition("RuntimeError: ")[2][:200]
        raise PeerLostError(f"rank {rank}, step {self.step}, {what}: a connection was closed ({first})") from error


Engine = ThinwireEngine | BaselineEngine
KINDS: dict[str, type[Baseline]] = {}
"""The baselines by name; one of another package is among them once its module has been imported."""


@dataclass(frozen=True)
class Baseline(ABC):
    """One of PyTorch's own methods; its `str` is its name, with the arguments that are not at their defaults."""

    name: ClassVar[str]
    paper: ClassVar[str] = (
        "Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020"
    )

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            KINDS[cls.name] = cls

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, size: int) -> None:
        """Accept any number of workers."""

    def engine(self, model: nn.Module, optimizer: Optimizer, control: Comm) -> BaselineEngine:
        """Wrap a model and its optimizer."""
        device = next(model.parameters()).device
        network = DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None, bucket_cap_mb=self.bucket_megabytes(model)
        )
        engine = BaselineEngine(network, optimizer, control)
        self.prepare(engine)
        return engine

    def bucket_megabytes(self, model: nn.Module) -> float | None:
        """Megabytes of gradient per bucket; None is DDP's default."""
        return None

    @abstractmethod
    def prepare(self, engine: BaselineEngine) -> None:
        """Register hooks."""

    def __str__(self) -> str:
        """Such as `ddp+powersgd(rank=4)`."""
        defaults = type(self)()
        given = {key: value for key, value in vars(self).items() if value != getattr(defaults, key)}
        inside = ", ".join(f"{key}={value!r}" for key, value in given.items())
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True)
class PlainDdp(Baseline):
    """DistributedDataParallel without a hook."""

    name = "ddp"

    def prepare(self, engine: BaselineEngine) -> None:
        """Count an all-reduce of all gradients per step."""
        trained = sum(p.nbytes for p in engine.network.parameters() if p.requires_grad)
        engine.payload_per_step = 2 * engine.share * trained


@dataclass(frozen=True)
class Bf16Gradients(Baseline):
    """Gradients are averaged in bfloat16.

    PyTorch's own hook for this requires NCCL; this one does the same over any backend.
    """

    name = "ddp+bf16"

    def prepare(self, engine: BaselineEngine) -> None:
        """Register a hook that casts, averages and casts back."""

        def hook(_: object, bucket: GradBucket) -> Future[Tensor]:
            gradients = bucket.buffer()
            halves = gradients.to(torch.bfloat16).div_(engine.control.size)
            engine.count_all_reduce(halves.nbytes)
            work = dist.all_reduce(halves, async_op=True)
            assert work is not None
            return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))

        engine.register(None, hook)


@dataclass(frozen=True)
class PowerSGD(Baseline):
    """Gradients are averaged as factors of a low-rank matrix, with error feedback.

    Args:
        rank: of the matrices; a lower rank sends fewer bytes and approximates more coarsely.
        start: steps before compression begins, at least 2; until then gradients are averaged uncompressed.
    """

    rank: int = 1
    start: int = 10

    name = "ddp+powersgd"
    paper = "Vogels et al., PowerSGD, NeurIPS 2019, arXiv:1905.13727"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ConfigError(f"rank={self.rank}: must keep at least 1 column")
        if self.start < 2:
            raise ConfigError(f"start={self.start}: must be at least 2; DDP rebuilds its buckets before that")

    def bucket_megabytes(self, model: nn.Module) -> float:
        """Return one bucket for all gradients."""
        # PyTorch's hook sends its later messages from the thread that received the earlier ones. Over Gloo, with
        # several buckets, each rank would send them in another order, and they would be matched wrongly.
        return 1 + sum(p.nbytes for p in model.parameters()) / (1 << 20)

    def prepare(self, engine: BaselineEngine) -> None:
        """Register PyTorch's hook; its own statistics give the bytes."""
        state = PowerSGDState(None, self.rank, self.start)

        def hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
            whole, before = state.iter < self.start, state.total_numel_after_compression
            result = powerSGD_hook(state, bucket)
            numbers = bucket.buffer().numel() if whole else state.total_numel_after_compression - before
            engine.count_all_reduce(numbers * bucket.buffer().element_size())
            return result

        engine.register(state, hook)


@dataclass(frozen=True)
class PostLocalSGD(Baseline):
    """Gradients are averaged at first; then only parameters, every `period` steps.

    PyTorch averages for the first time one step after the start, and every `period` steps from there.

    Args:
        period: steps between averages of parameters.
        start: steps before it begins; PyTorch's own examples use 100.
    """

    period: int = 8
    start: int = 0

    name = "post-local-sgd"
    paper = "Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv:1808.07217"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 2:
            raise ConfigError(f"period={self.period}: must be at least 2 steps. Use ddp to average at every step")
        if self.start < 0:
            raise ConfigError(f"start={self.start}: must be at least 0")

    def prepare(self, engine: BaselineEngine) -> None:
        """Register PyTorch's hook, and its averager after each optimizer step."""
        state = PostLocalSGDState(None, None, self.start, post_local_gradient_allreduce=False)

        def hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[Tensor]:
            if state.iter < self.start:
                engine.count_all_reduce(bucket.buffer().nbytes)
            return post_localSGD_hook(state, bucket)

        engine.register(state, hook)
        averager = PeriodicModelAverager(self.period, warmup_steps=self.start)

        def average() -> None:
            start, steps_since = time.perf_counter(), averager.step - averager.warmup_steps
            parameters = [p for p in engine.network.parameters() if p.grad is not None]
            averager.average_parameters(iter(parameters))
            # The averager does not tell whether it averaged; this is its own condition.
            if steps_since >= 0 and steps_since % averager.period == 0:
                engine.record_wait("parameters", start, time.perf_counter())
                engine.count_all_reduce(sum(p.nbytes for p in parameters))

        engine.average = average
