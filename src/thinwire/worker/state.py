"""What is known of one worker, for everything that saves, restores or drives it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.comm.base import Comm
from thinwire.replica.flat import Segment
from thinwire.replica.replica import Replica
from thinwire.replica.shards import Shards, folder_of
from thinwire.strategies.base import Strategy
from thinwire.worker.buckets import Backward


class WorkerState:
    """One worker's model, optimizer and vectors, without the hooks that train them.

    Attributes:
        model: the user's.
        optimizer: the user's, over parameters of `model`.
        strategy: the recipe.
        comm: the ranks; `comm.meter` holds bytes and seconds.
        seed: the key of the strategy's random draws, equal on all ranks.
        replicas: the flat vectors and their state, one for each (dtype, device).
        layouts: the parameters of each replica, and where they lie in its vector.
        shards: parameters of which this rank holds a part.
        backward: the exchange of gradients during the backward pass, where there is one.
        scaler: the loop's GradScaler, where it has one.
        block: a name for the part of the model that this rank holds, where it is cut over a mesh.
        undo: what `detach` undoes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy, comm: Comm, *, seed: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.comm = comm
        self.seed = seed
        self.replicas: list[Replica] = []
        self.layouts: list[tuple[list[nn.Parameter], tuple[Segment, ...]]] = []
        self.shards = Shards(model, [])
        self.backward: Backward | None = None
        self.scaler: torch.amp.GradScaler | None = None
        self.block = ""
        self.undo = ExitStack()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.replicas[0].step

    def wait_pending(self) -> None:
        """Wait for every message in flight, using none of them yet."""
        for replica in self.replicas:
            replica.wait_pending()

    def own_folder(self, folder: str | Path) -> Path:
        """Where the ranks that hold the same parts of the model keep their checkpoints."""
        return Path(folder) / (self.block or folder_of(p for parameters, _ in self.layouts for p in parameters))
