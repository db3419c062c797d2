# SPDX-License-Identifier: Apache-2.0
"""The optimizer state of parameters: momentum, Adam's moments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.comm.base import Comm
from thinwire.core.replica.flat import Segment, copy_each_
from thinwire.core.replica.shards import local
from thinwire.errors import ConfigError


class Combined(Optimizer):
    """The interface of `thinwire.CombinedOptimizer`, which consists of optimizers with separate parameters."""

    optimizers: tuple[Optimizer, ...]


class Moments:
    """The optimizer state of one replica's parameters, which strategies may reset or average.

    A moment is a floating-point tensor with the shape of its parameter; step counters and the like are not moments.

    Attributes:
        optimizer: the worker's optimizer; None if there is none, and then no call has an effect.
        parameters: the replica's parameters.
        segments: the position of each parameter in the replica's vector.
    """

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        parameters: Sequence[nn.Parameter] = (),
        segments: Sequence[Segment] = (),
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.segments = segments

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the moments of each parameter; the same on every rank."""
        return tuple(sorted({name for name, _ in self._dtypes}))

    @cached_property
    def _dtypes(self) -> dict[tuple[str, torch.dtype], torch.dtype]:
        return {} if self.optimizer is None else moment_dtypes(self.optimizer)

    def forget(self) -> None:
        """Reset the optimizer state to that of a new optimizer: no moments and a step count of zero."""
        if self.optimizer is None:
            return
        for parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
        own = set(self.parameters)
        for each in parts_of(self.optimizer):
            for group in each.param_groups:
                # LAMB counts the steps of a group. While parameters of another replica in it have moments, their
                # correction needs the count; the last replica resets it.
                members = group["params"]
                if "step" in group and not own.isdisjoint(members) and not any(map(each.state.get, members)):
                    group["step"] = 0 * group["step"]  # a tensor stays one
            for parameter, state in fresh_optimizer(each).state.items():
                if parameter in own and state:  # Adagrad fills its state in its constructor
                    each.state[parameter] = state

    def average_(self, comm: Comm, names: Sequence[str] | None = None) -> None:
        """Replace moments with their means over ranks: one all-reduce of the size of the parameters per name.

        Moments are sent in the dtype that the optimizer keeps them in, with one all-reduce per dtype: small variances
        in fp32 would vanish in a parameter's fp16. A rank without a moment contributes zero, and still has none
        afterwards.

        Args:
            comm: the ranks.
            names: of the moments; by default all.
        """
        if not self.names:
            return
        own = self.parameters[0].dtype
        together: dict[torch.dtype, list[str]] = {}
        for name in self.names if names is None else names:
            together.setdefault(self._dtypes.get((name, own), own), []).append(name)
        for dtype, each in together.items():
            self._average_(comm, each, dtype)

    def _average_(self, comm: Comm, names: Sequence[str], dtype: torch.dtype) -> None:
        assert self.optimizer is not None, "no optimizer has no moments"
        # One vector for all moments, with zeros for missing ones: every rank must send the same size.
        length = self.segments[-1].stop
        vector = torch.zeros(len(names) * length, dtype=dtype, device=self.parameters[0].device)
        held: list[Tensor] = []
        targets: list[Tensor] = []
        for name, row in zip(names, vector.view(len(names), length), strict=True):
            for parameter, segment in zip(self.parameters, self.segments, strict=True):
                moment = self.optimizer.state.get(parameter, {}).get(name)
                if moment is not None:
                    held.append(local(moment))
                    targets.append(segment.of(row))
        if held:
            copy_each_(targets, held)
        if comm.rank in comm.silent:
            vector.zero_()
        comm.all_reduce_(vector).wait().div_(comm.size - len(comm.silent))
        if held:
            copy_each_(held, targets)


def check_periods(periods: Sequence[int], period: int, optimizer: Optimizer | None) -> None:
    """Refuse periods of moments that are no multiples of a round's, or that the optimizer has no moments for.

    Raises:
        ConfigError: with the rule.
    """
    if any(each < 1 or each % period for each in periods):
        raise ConfigError(
            f"moments={tuple(periods)}: each must be a multiple of period={period}, so that moments are sent at the "
            f"end of a round. Use ({3 * period}, {6 * period}), for example"
        )
    if periods and optimizer is not None and len(periods) > len(names := moment_names(optimizer)):
        raise ConfigError(
            f"moments={tuple(periods)} with {type(optimizer).__name__}: it has {len(names)} moments. Give at most one "
            "period for each"
        )


def average_due_(moments: Moments, comm: Comm, periods: Sequence[int], step: int) -> None:
    """Average the moments whose period ends with this step; periods are in the order of the moments' names."""
    # Only now, as some optimizers cannot say what their moments are.
    if any(step % period == 0 for period in periods):
        names = zip(moments.names, periods, strict=False)
        moments.average_(comm, [name for name, period in names if step % period == 0])


def parts_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the parts of a `CombinedOptimizer`; any other optimizer is its only part."""
    return optimizer.optimizers if isinstance(optimizer, Combined) else (optimizer,)


def fresh_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]] | None = None) -> Optimizer:
    """Make a new optimizer of the same class with the same hyperparameters.

    Args:
        optimizer: the original, which is not changed.
        groups: parameter groups with their hyperparameters; by default the optimizer's own.

    Raises:
        ConfigError: the class needs other arguments than parameter groups.
    """
    kind: Any = type(optimizer)
    # Groups hold all hyperparameters, except Adagrad's initial value, which is an argument only.
    arguments = {name: optimizer.defaults[name] for name in signature(kind).parameters if name in optimizer.defaults}
    try:
        made: Optimizer = kind([dict(group) for group in groups or optimizer.param_groups], **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{kind.__name__}: cannot be created from its parameter groups ({error}), so its moments are "
            "unknown. Use buffers='maintain'"
        ) from error
    return made


def moment_names(optimizer: Optimizer) -> tuple[str, ...]:
    """Find the names of an optimizer's moments with one step of a new optimizer on small parameters.

    An optimizer without a step holds no moments yet, and ranks that have made steps must agree with ranks that have
    not.

    Raises:
        ConfigError: such a step fails.
    """
    return tuple(sorted({name for name, _ in moment_dtypes(optimizer)}))


def moment_dtypes(optimizer: Optimizer) -> dict[tuple[str, torch.dtype], torch.dtype]:
    """Find the dtype of an optimizer's moments, by their name and the dtype of their parameter.

    It is at least as wide as the parameter's; if moments of one name differ, it is the widest.

    Raises:
        ConfigError: a step of a new optimizer fails.
    """
    found: dict[tuple[str, torch.dtype], torch.dtype] = {}
    for tried in map(_after_a_step, parts_of(optimizer)):
        for parameter, state in tried.state.items():
            for name, x in state.items():
                if isinstance(x, Tensor) and x.is_floating_point() and x.dim() and x.shape == parameter.shape:
                    widest = found.get((name, parameter.dtype), parameter.dtype)
                    found[name, parameter.dtype] = x.dtype if x.dtype.itemsize > widest.itemsize else widest
    return found


def _after_a_step(optimizer: Optimizer) -> Optimizer:
    """Make a new optimizer of the same class and take one step on small parameters."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        samples: list[nn.Parameter] = []
        # One for each shape and dtype: Adafactor, for example, keeps different state for matrices and vectors.
        for dimensions, dtype, device in sorted({(p.dim(), p.dtype, p.device) for p in group["params"]}, key=str):
            sample = nn.Parameter(torch.zeros((2,) * dimensions, dtype=dtype, device=device))
            sample.grad = torch.zeros_like(sample)
            samples.append(sample)
        # A frozen variance admits no new parameter.
        groups.append({**group, "params": samples, **({"frozen": False} if "frozen" in group else {})})
    tried = fresh_optimizer(optimizer, groups)
    try:
        # Torch creates counters on the default device; a trial's counters belong on the host.
        with torch.device("cpu"):
            tried.step()
    except (TypeError, RuntimeError) as error:
        name = type(optimizer).__name__
        raise ConfigError(f"{name}: its state is unknown ({error}). Use buffers='maintain'") from error
    return tried
