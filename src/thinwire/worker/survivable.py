# SPDX-License-Identifier: Apache-2.0
"""What elastic workers refuse before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.replica.shards import is_sharded
from thinwire.strategies.base import Strategy, codecs_of, nested
from thinwire.worker.compatibility import check_sparse, evaluates_several_gradients


def check_elastic(
    strategy: Strategy,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    others: Sequence[object],
    *,
    scaled: bool,
    find_unused: bool,
) -> None:
    """Refuse what could not go on when a worker is lost, before anything is sent.

    Raises:
        ConfigError: with the reason and what to use instead.
    """
    check_survives(strategy)
    if any(other is not None for other in others):
        raise ConfigError(
            "elastic=True with a group, a comm or a mesh: these have fixed ranks; leave them out, or pass a Fleet"
        )
    if any(is_sharded(p) or p.device.type != "cpu" for p in parameters.values()):
        raise ConfigError(
            "elastic=True with parameters that are sharded or not on the CPU: connections are Gloo's, and every worker "
            "must hold the whole model; use worker.save and resume where a worker is lost"
        )
    if evaluates_several_gradients(optimizer):
        raise ConfigError(
            f"elastic=True with {type(optimizer).__name__}: its step evaluates several gradients, and could not be "
            "repeated as a whole; use an optimizer that takes one"
        )
    check_sparse(strategy, optimizer)  # also of one worker, which others may join
    if find_unused:
        raise ConfigError("elastic=True with find_unused=True: use find_unused=False, where a missing gradient is zero")
    if scaled and (strategy.traits.reads_gradient or not strategy.traits.sends_gradients):
        raise ConfigError(
            f"elastic=True with a GradScaler and {type(strategy).__name__}: workers would have to agree on skipped "
            "steps; train in bf16, which needs no scaler, or use AllReduce()"
        )


def check_survives(strategy: Strategy) -> None:
    """Refuse a strategy that cannot go on when a worker is lost.

    Raises:
        ConfigError: with the reason.
    """
    for each in reversed(list(nested(strategy))):
        for part in (each, *codecs_of(each)):
            if reason := part.traits.inelastic_reason if isinstance(part, Strategy) else part.inelastic:
                raise ConfigError(f"elastic=True with {type(part).__name__}: {reason}")
