"""Uneven numbers of batches: a rank whose data has ended keeps answering the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

import torch

from thinwire.errors import ConfigError
from thinwire.strategies.base import Strategy
from thinwire.worker.state import WorkerState

Batch = TypeVar("Batch")


class _End:
    """No more batches."""


_END = _End()


def join(worker: WorkerState, batches: Iterable[Batch], after_step: Callable[[], None]) -> Iterator[Batch]:
    """Yield this rank's batches, then take the steps that other ranks still have data for."""
    lengths = _lengths(worker, len(batches) if isinstance(batches, Sized) else -1)
    counted = min(lengths) >= 0
    iterator = iter(batches)
    step = 0
    try:
        while True:
            batch = next(iterator, _END)
            active = sum(step < n for n in lengths) if counted else _vote(worker, batch is not _END)
            if not active:
                return
            _expect(worker, active)
            if isinstance(batch, _End):
                answer(worker)
                after_step()
            else:
                yield batch
            step += 1
    finally:
        _expect(worker, worker.comm.size)


def refuse_left_out(strategy: Strategy, *, find_unused: bool, scaled: bool) -> None:
    """Refuse loops that count on every worker's every step, under a strategy whose late workers leave some out.

    Raises:
        ConfigError: with what counts on it.
    """
    asked = [name for name, value in (("find_unused=True", find_unused), ("a GradScaler", scaled)) if value]
    if strategy.leaves_out_steps and asked:
        raise ConfigError(
            f"{strategy} with {' and '.join(asked)}: a late worker leaves out steps, which these count; let every "
            "parameter have a gradient, and train in bfloat16, which needs no scaler"
        )


def _expect(worker: WorkerState, active: int) -> None:
    for replica in worker.replicas:
        replica.active = active


def answer(worker: WorkerState) -> None:
    """One step without a batch: no gradient of one's own, the exchanged one where gradients are exchanged."""
    worker.optimizer.zero_grad(set_to_none=True)
    if worker.backward is not None:
        worker.backward.flush()
    if worker.scaler is None:
        worker.optimizer.step()
    else:
        # A scaler sets itself up with the first loss, of which this rank may have had none.
        worker.scaler.scale(torch.zeros((), device=worker.replicas[0].x.device))
        worker.scaler.step(worker.optimizer)
        worker.scaler.update()
    worker.optimizer.zero_grad(set_to_none=True)


def _lengths(worker: WorkerState, mine: int) -> list[int]:
    length = torch.tensor([mine], device=worker.replicas[0].x.device)
    return [int(n.item()) for n in worker.comm.all_gather(length).wait()]


def _vote(worker: WorkerState, has_batch: bool) -> int:
    """How many ranks have a batch for this step: 4 bytes per step, summed."""
    vote = torch.tensor([float(has_batch)], device=worker.replicas[0].x.device)
    return int(worker.comm.all_reduce_(vote).wait().item())
