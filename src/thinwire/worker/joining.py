# SPDX-License-Identifier: Apache-2.0
"""Uneven numbers of batches: a rank without data keeps taking part in the other ranks' steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

import torch

from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import pace_rule
from thinwire.worker.compatibility import evaluates_several_gradients
from thinwire.worker.state import WorkerState

Batch = TypeVar("Batch")


class _End:
    """No more batches."""


_END = _End()


def join(
    worker: WorkerState,
    batches: Iterable[Batch],
    before_step: Callable[[], object],
    after_step: Callable[[], object],
) -> Iterator[Batch]:
    """Yield this rank's batches, then take the steps for which other ranks still have data."""
    if evaluates_several_gradients(worker.optimizer):
        raise ConfigError(
            f"join() with {type(worker.optimizer).__name__}: its step calls a closure, which a rank without a batch "
            "does not have. Give all ranks the same number of batches"
        )
    if worker.strategy.traits.meets_every > 1:
        raise ConfigError(
            f"join() with {worker.strategy}: {pace_rule(worker.strategy)}. Let the data of every rank go round"
        )
    worker.comm.check_in_step("join()").wait()
    device = worker.replicas[0].x.device
    own = torch.tensor([len(batches) if isinstance(batches, Sized) else -1], dtype=torch.int64, device=device)
    lengths = [int(n.item()) for n in worker.comm.all_gather(own).wait()]
    known = min(lengths) >= 0
    iterator = iter(batches)
    step = 0
    try:
        while True:
            batch = next(iterator, _END)
            worker.end_failed_pass()
            if known:
                active = sum(step < n for n in lengths)
            else:
                has_batch = torch.tensor([float(batch is not _END)], dtype=torch.float32, device=device)
                active = int(worker.comm.all_reduce_(has_batch).wait().item())
            if not active:
                return
            _set_active(worker, active)
            if isinstance(batch, _End):
                step_without_batch(worker, before_step)
                after_step()
            else:
                yield batch
            step += 1
    finally:
        # Also when the loop breaks early: later steps count every rank again.
        _set_active(worker, worker.comm.size)


def _set_active(worker: WorkerState, active: int) -> None:
    for replica in worker.replicas:
        replica.active = active


def step_without_batch(worker: WorkerState, before_step: Callable[[], object] = lambda: None) -> None:
    """Take one step without a gradient of this rank's own; where gradients are exchanged, with the others' mean."""
    worker.optimizer.zero_grad(set_to_none=True)
    if worker.backward is not None:
        worker.backward.flush()
    if worker.scaler is None:
        before_step()
        worker.optimizer.step()
    else:
        # A scaler sets itself up with the first loss, which this rank may never have had.
        worker.scaler.scale(torch.zeros((), dtype=torch.float32, device=worker.replicas[0].x.device))
        before_step()
        worker.scaler.step(worker.optimizer)
        worker.scaler.update()
    worker.optimizer.zero_grad(set_to_none=True)
