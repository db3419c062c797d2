# SPDX-License-Identifier: Apache-2.0
"""The data of one worker, for the modules that train, save, restore and resize it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from thinwire.core.comm.base import Comm
from thinwire.core.replica.flat import Segment
from thinwire.core.replica.replica import Replica
from thinwire.core.replica.shards import Shards, shard_folder
from thinwire.errors import CommError, ConfigError
from thinwire.methods.strategies.base import Strategy
from thinwire.tensor2d.mesh import Mesh3D
from thinwire.worker.buckets import Backward
from thinwire.worker.times import Account

Policy = Literal["raise", "skip", "ignore"]


def shares(global_batch: int, size: int) -> list[range]:
    """Divide the positions of a global batch evenly among `size` workers, in rank order.

    Example:
        >>> from thinwire.worker.state import shares
        >>> shares(8, 3)
        [range(0, 3), range(3, 6), range(6, 8)]
    """
    ends = [-(-rank * global_batch // size) for rank in range(size + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


@dataclass
class GlobalBatch:
    """One worker's part of the global batch of each step.

    Args:
        samples: in the global batch.

    Attributes:
        step: the step whose share was read last.
        members: the workers that the global batch of that step was divided among.
    """

    samples: int
    step: int = -1
    members: Sequence[object] = field(default_factory=tuple[object, ...])

    def check(self, size: int) -> None:
        """Refuse more workers than samples.

        Raises:
            ConfigError: with the numbers.
        """
        if self.samples < size:
            raise ConfigError(
                f"global_batch={self.samples} with {size} workers: each worker needs at least one sample. Use a larger "
                "global batch or fewer workers"
            )

    def share(self, step: int, members: Sequence[object], own: object) -> range:
        """Return this worker's positions in the global batch of a step."""
        self.check(len(members))
        self.step, self.members = step, tuple(members)
        return shares(self.samples, len(members))[self.members.index(own)]

    def factor(self, step: int, members: Sequence[object], own: object) -> float:
        """Return the factor of this worker's mean gradient in a plain mean over `members`.

        The result is the mean over all samples. After the loss of a worker it is the mean over the samples of the rest.

        Raises:
            ConfigError: the share of this step was not read.
        """
        if self.step != step:
            raise ConfigError(
                f"step {step}: the share of the global batch was not read. A worker's share changes with the number of "
                "workers. Call batch_share(worker) of thinwire.elastic.sampler before each step, and use these samples"
            )
        parts = shares(self.samples, len(self.members))
        sizes = {each: len(part) for each, part in zip(self.members, parts, strict=True)}
        there = [sizes[each] for each in members if each in sizes]
        return sizes[own] * len(members) / sum(there)


# Apart from `Worker`, so that checkpoints, resizing and joining need not import the module that imports them.
class WorkerState:
    """One worker's model, optimizer and flat vectors, without the hooks that train them.

    Attributes:
        model: the user's model.
        optimizer: the user's optimizer, over parameters of `model`.
        strategy: the recipe.
        comm: the ranks; `comm.meter` counts bytes and seconds.
        seed: seed of the strategy's random draws, equal on all ranks.
        replicas: the flat vectors and their state, one for each (dtype, device).
        layouts: for each replica, its parameters and where they lie in its vector.
        started: for each replica, the dtypes and shapes of the state that the strategy began with, by name.
        shards: the sharded parameters, of which this rank holds a part.
        backward: the gradient exchange during the backward pass; None where the strategy has none.
        scaler: the loop's GradScaler, if it uses one.
        block: on a mesh, a name for the part of the model that this rank holds; else empty.
        undo: callbacks that `detach` runs to remove the hooks.
        mesh: the ranks of all copies of a model that is split; None if it is not.
        bucket_bytes: bytes of gradient per message.
        find_unused: whether parameters without a gradient on any rank keep none.
        nonfinite: what to do with a gradient that is NaN or infinite.
        watching: the hooks of `backward` on the parameters.
        shares_skips: whether the scaler was made to skip the same steps on all ranks, or to count skipped ones.
        may_be_in_step: whether the comm compares steps, unless a strategy's workers go at their own pace.
        lent: how many `consensus()` blocks are open.
        step_frame: of the optimizer's step that is running, or that an exception has ended; else None.
        exchanging: whether the strategy's part of a step has begun, and not ended.
        automatic: whether "auto" has chosen the strategy, so that a checkpoint's takes its place.
        just_switched: whether no step was taken since the last switch.
        account: counts steps and bytes, for `Worker.stats`.
        start_step: called before the first message of a step, if not None.
        global_batch: the samples of each step, which all workers share; None where each chooses its own number.
        members: returns the workers that train together, and this one among them.
        common: returns the parameters that all workers agree on, of each replica; None where the strategy has them.
        folder: the name of the folder of this worker's checkpoints, if workers save at steps of their own; else empty.
        pack_rounds: returns what such a worker saves besides its state; None where all workers save together.
        load_alone: continues from such checkpoints in a folder, and returns the saved `extra`; with True, returns {} if
            there are none.
        survives: runs the exchange of a backward pass, again where a worker was lost in it; None where that ends it.
        resumed: whether a saved state of the worker was loaded.
        frozen: parameters that no optimizer trained at `attach`; empty after the first step.
        start_fingerprint: of the parameters that the strategy has started from; None after the first step.
        fingerprint_before_load: of the parameters when `load_state_dict` of the model or a part of it was called since
            the last step; None if it was not.
        own_gradient: a sum over the bits of this rank's own gradients of this step; None after the first steps.
        refuses_equal_batches: lines that make ranks read different batches, for the error of ranks that read the same
            ones; empty where they get a warning.
        drift_reported: whether a use of one worker's own model in place of the consensus model was reported.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, comm: Comm, *, seed: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.comm = comm
        self.seed = seed
        self.replicas: list[Replica] = []
        self.layouts: list[tuple[list[nn.Parameter], tuple[Segment, ...]]] = []
        self.started: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = []
        self.shards = Shards(model, [])
        self.backward: Backward | None = None
        self.scaler: torch.amp.GradScaler | None = None
        self.block = ""
        self.undo = ExitStack()
        self.mesh: Mesh3D | None = None
        self.bucket_bytes = 8 << 20
        self.find_unused = False
        self.nonfinite: Policy = "raise"
        self.watching: list[RemovableHandle] = []
        self.shares_skips = False
        self.may_be_in_step = comm.in_step
        self.lent = 0
        self.step_frame: FrameType | None = None
        self.exchanging = False
        self.refuses_equal_batches = ""
        self.automatic = False
        self.just_switched = False
        self.told_rounding = False
        self.account = Account(comm, next(iter(optimizer.param_groups[0]["params"])).device)
        self.start_step: Callable[[], None] | None = None
        self.resumed = False
        self.frozen: list[Tensor] = []
        self.start_fingerprint: int | None = None
        self.fingerprint_before_load: int | None = None
        self.own_gradient: int | None = None
        self.drift_reported = False
        self.global_batch: GlobalBatch | None = None
        self.members: Callable[[], tuple[Sequence[object], object]] = lambda: (range(comm.size), comm.rank)
        self.common: Callable[[], Sequence[Tensor]] | None = None
        self.awaited: Callable[[], list[int]] | None = None
        self.folder = ""
        self.pack_rounds: Callable[[], dict[str, Any]] | None = None
        self.load_alone: Callable[[Path, bool], dict[str, Any]] | None = None
        self.survives: Callable[[Callable[[], None]], None] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.replicas[0].step

    def publish(self, send: Callable[[Callable[[], str]], None]) -> None:
        """Let heartbeats carry this worker's report; `send` is that of its entry into the run."""
        self.account.keeps_loss = True
        send(self.report)

    def report(self) -> str:
        """Return this worker's progress as JSON, for `thinwire watch`; any thread may call it."""
        stats, traffic = self.account.stats(), self.comm.traffic
        found = {
            "strategy": str(self.strategy),
            "step": self.step,
            "rounds": stats.averages,
            "loss": self.account.loss,
            "payload_bytes": stats.payload_bytes,
            "steps_taken": stats.steps,
            "data_seconds": stats.data_seconds,
            "compute_seconds": stats.compute_seconds,
            "wait_seconds": stats.wait_seconds,
            "bytes_up": 0 if traffic is None else traffic.bytes_up,
            "bytes_down": 0 if traffic is None else traffic.bytes_down,
            "awaited": (self.awaited or self.comm.awaited)(),
        }
        return json.dumps(found)

    def wait_pending(self) -> None:
        """Wait for all messages in flight, without using them yet."""
        for replica in self.replicas:
            replica.wait_pending()

    def metrics(self, *, clear: bool = False) -> dict[str, float]:
        """Return the strategy's latest measurements by name; with several flat vectors, the largest of each.

        Args:
            clear: whether they are forgotten, so that the next call has newer ones only.
        """
        found: dict[str, float] = {}
        for replica in self.replicas:
            for name, value in replica.metrics.items():
                found[name] = max(found.get(name, float("-inf")), float(value))
            if clear:
                replica.metrics.clear()
        return found

    def end_failed_pass(self) -> None:
        """Let all ranks agree on a failed backward pass; see `Backward.end_failed`."""
        self.refuse_interrupted()
        if self.backward is not None:
            self.backward.end_failed()

    def refuse_interrupted(self) -> None:
        """Refuse to continue if an exception, such as that of Ctrl-C, has ended an exchange of parameters.

        Raises:
            CommError: naming the step.
        """
        if self.exchanging:
            raise CommError(
                f"{self.comm.name(self.comm.rank)}, step {self.step}: an exception ended this step while "
                f"{self.strategy} exchanged parameters, so they may be half averaged. Restart from a checkpoint"
            )

    def own_folder(self, folder: str | Path) -> Path:
        """Return the subfolder for checkpoints of this worker, or of the ranks that hold the same part of the model."""
        shards = (p for parameters, _ in self.layouts for p in parameters)
        return Path(folder) / (self.folder or self.block or shard_folder(shards))
