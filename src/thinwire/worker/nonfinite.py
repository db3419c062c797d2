# SPDX-License-Identifier: Apache-2.0
"""What to do with a gradient that is NaN or infinite, on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.kernels import all_finite_each
from thinwire.replica.shards import is_sharded, plain
from thinwire.worker.buckets import NonFinite
from thinwire.worker.compatibility import evaluates_several_gradients
from thinwire.worker.state import Policy, WorkerState


def check_policy(policy: Policy, parameters: Iterable[Tensor], blocks: int, optimizer: Optimizer) -> None:
    """Refuse a policy that is none, and one by which parts of a model or of a step would be left out.

    Raises:
        ConfigError: with the policy and what to use instead.
    """
    if policy not in ("raise", "skip", "ignore"):
        raise ConfigError(f'nonfinite={policy!r}: must be "raise", "skip" or "ignore"')
    sharded = any(is_sharded(p) for p in parameters)
    if policy == "skip" and (sharded or blocks > 1):
        parts = "sharded parameters" if sharded else f"a model in {blocks} blocks"
        raise ConfigError(
            f'nonfinite="skip" with {parts}: each rank sees its own part of a gradient, and parts of one model would '
            'leave out different steps; use nonfinite="raise" and resume from a checkpoint'
        )
    if policy == "skip" and evaluates_several_gradients(optimizer):
        raise ConfigError(
            f'nonfinite="skip" with {type(optimizer).__name__}: a step has several gradients, and would go on with '
            'zeros in place of one; use nonfinite="raise"'
        )


def handle_nonfinite(worker: WorkerState, policy: Policy) -> bool:
    """Look at the gradient that the optimizer is about to use; raise, or drop it, where it is not finite.

    Where the mean of the gradients was exchanged in the backward pass, it is the same on all ranks, and so is what they
    do. Elsewhere a rank looks at its own gradient.

    Returns:
        Whether a common gradient was dropped, on all ranks, so that nothing is to be updated.

    Raises:
        NonFiniteError: on all ranks, under the policy "raise".
    """
    if policy == "ignore" or _left_to_scaler(worker):
        return False
    backward = worker.backward
    common = backward is not None and backward.exchanged
    if backward is not None and backward.exchanged:
        found = backward.nonfinite
        if found is None:
            return False
    else:
        name = _first_nonfinite(worker)
        if name is None:
            return False
        found = NonFinite(worker.comm.rank, name)
    if policy == "raise":
        error = found.error(worker.step, worker.comm)
        if common and not worker.strategy.traits.skips_steps:
            raise error  # as all ranks do
        worker.comm.raise_on_all(error)
    for replica in worker.replicas:
        replica.metrics["skipped_steps"] = 1.0
    if common or not worker.strategy.traits.skips_nonfinite:
        drop_gradients(worker)
    return common


def drop_gradients(worker: WorkerState) -> None:
    """Leave all trained parameters without a gradient, so that optimizers leave them and their state as they are."""
    for parameters, _ in worker.layouts:
        for parameter in parameters:
            parameter.grad = None


def _left_to_scaler(worker: WorkerState) -> bool:
    """Whether a GradScaler has found the gradient out, and the optimizer will leave out the step by itself."""
    # Fused optimizers are called all the same; others are not called, and no hook of theirs runs.
    found_inf = getattr(worker.optimizer, "found_inf", None)
    return isinstance(found_inf, Tensor) and bool(found_inf.item())


def _first_nonfinite(worker: WorkerState) -> str | None:
    """The name of the first parameter whose gradient on this rank is not finite."""
    for parameters, segments in worker.layouts:
        if all_finite_each(gradients_of(parameters)):
            continue
        for parameter, segment in zip(parameters, segments, strict=True):
            if not all_finite_each(gradients_of([parameter])):
                return segment.name
    return None


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The dense gradients on this rank of the parameters that have one."""
    grads = [plain(p.grad) for p in parameters if p.grad is not None]
    return [grad if grad.layout == torch.strided else grad.to_dense() for grad in grads]
