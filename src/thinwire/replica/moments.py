"""What an optimizer remembers of its parameters: momentum, Adam's moments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.base import Comm
from thinwire.errors import ConfigError
from thinwire.replica.flat import Segment, copy_each_
from thinwire.replica.shards import local


class Moments:
    """The state that an optimizer keeps for the parameters of one replica, as strategies may touch it.

    A moment is a tensor of floating dtype in the shape of its parameter. Step counters and the like are none.

    Attributes:
        optimizer: the worker's own; None where there is none, and then there is nothing to touch.
        parameters: of the replica.
        segments: where each lies in the replica's vector.
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
        """Of the moments that the optimizer keeps for each parameter, or will: equal on every rank, at any time."""
        return () if self.optimizer is None else moments_of(self.optimizer)

    def forget(self) -> None:
        """Leave the optimizer as it was made: no momentum, no moments, and steps counted from zero."""
        if self.optimizer is None:
            return
        new = made_anew(self.optimizer)
        for parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
            if new.state.get(parameter):
                self.optimizer.state[parameter] = new.state[parameter]

    def average_(self, comm: Comm) -> None:
        """Replace every moment by its mean over ranks: one all-reduce, of the parameters' size for each name.

        A rank that has no such moment yet counts as zero, and keeps none.
        """
        if self.optimizer is None or not self.names:
            return
        length = self.segments[-1].stop
        like = self.parameters[0]
        vector = torch.zeros(len(self.names) * length, dtype=like.dtype, device=like.device)
        held: list[Tensor] = []
        places: list[Tensor] = []
        for name, row in zip(self.names, vector.view(len(self.names), length), strict=True):
            for parameter, segment in zip(self.parameters, self.segments, strict=True):
                moment = self.optimizer.state.get(parameter, {}).get(name)
                if moment is not None:
                    held.append(local(moment))
                    places.append(segment.of(row))
        if held:
            copy_each_(places, held)
        comm.all_reduce_(vector).wait().div_(comm.size)
        if held:
            copy_each_(held, places)


def made_anew(optimizer: Optimizer, groups: list[dict[str, Any]] | None = None) -> Optimizer:
    """An optimizer of the same kind and settings that has done nothing yet.

    Args:
        optimizer: stays as it is.
        groups: parameter groups with their settings; the optimizer's own unless given.

    Raises:
        ConfigError: its kind asks for more than parameter groups.
    """
    kind: Any = type(optimizer)
    # Groups hold all settings, but what Adagrad begins with it asks its caller for.
    told = {name: optimizer.defaults[name] for name in signature(kind).parameters if name in optimizer.defaults}
    try:
        made: Optimizer = kind([dict(group) for group in groups or optimizer.param_groups], **told)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{kind.__name__}: cannot be made anew from its parameter groups ({error}), so what it remembers cannot be "
            "told; use buffers='maintain'"
        ) from error
    return made


def moments_of(optimizer: Optimizer) -> tuple[str, ...]:
    """The names of an optimizer's moments, found out by a step of one of its kind on a few zeros.

    Raises:
        ConfigError: its kind cannot be tried out so.
    """
    groups = [{**group, "params": _samples(group["params"])} for group in optimizer.param_groups]
    tried = made_anew(optimizer, groups)
    try:
        tried.step()
    except (TypeError, RuntimeError) as error:
        name = type(optimizer).__name__
        raise ConfigError(f"{name}: what it remembers cannot be told ({error}); use buffers='maintain'") from error
    found = {
        name
        for parameter, state in tried.state.items()
        for name, x in state.items()
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() and x.shape == parameter.shape
    }
    return tuple(sorted(found))


def _samples(parameters: Sequence[Tensor]) -> list[nn.Parameter]:
    """A small parameter of every kind among these, with a gradient of zeros."""
    kinds = {(p.dim(), p.dtype, p.device) for p in parameters}
    samples: list[nn.Parameter] = []
    for dimensions, dtype, device in sorted(kinds, key=str):
        sample = nn.Parameter(torch.zeros((2,) * dimensions, dtype=dtype, device=device))
        sample.grad = torch.zeros_like(sample)
        samples.append(sample)
    return samples
