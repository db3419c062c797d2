"""Parameters that are moved together, and which of their slots are."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.fusion.store import owner_of

Group = dict[str, Any]
Tensors = list[Tensor]


@dataclass(slots=True)
class ParameterBatch:
    """Parameters of one group, of the same age, to be moved together.

    Args:
        parameters: each [models, ...].
        gradients: in the same order; they may be overwritten by what is computed from them, but not in place.
        states: each named state of the parameters, in the same order.
        values: hyperparameters, float64 vectors [models] on the host.
        steps: each model's number of steps, this one included; float64 [models] on the host.
        group: the group, for settings that all models share.
    """

    parameters: Tensors
    gradients: Tensors
    states: dict[str, Tensors]
    values: dict[str, Tensor]
    steps: Tensor
    group: Group


def in_rows(handful: ParameterBatch) -> bool:
    """Whether every model's part of every tensor is a row in the host's memory, as the kernels for rows need it."""
    first = handful.parameters[0].dtype
    columns = (handful.parameters, *handful.states.values())
    return first in (torch.float32, torch.float64) and all(
        tensor.device.type == "cpu" and tensor.dtype == first and tensor.is_contiguous()
        for column in columns
        for tensor in column
    )


@contextmanager
def as_they_were(columns: Sequence[Tensors], active: Tensor) -> Generator[None]:
    """Inside, all slots may be written to; afterwards those that are not active are what they were, bitwise."""
    stopped = (~active).nonzero().flatten()
    tensors = [tensor for column in columns for tensor in column] if len(stopped) else []
    held = [tensor[stopped.to(tensor.device)] for tensor in tensors]
    yield
    for tensor, rows in zip(tensors, held, strict=True):
        tensor[stopped.to(tensor.device)] = rows


def slots_of(parameter: Tensor) -> slice:
    """The slots whose part of a vector a parameter is moved by."""
    owner = owner_of(parameter)
    return slice(None) if owner is None else slice(owner, owner + 1)


def count_models(given: Sequence[Any]) -> int:
    """The number of models, from the parameters."""
    parameters = [p for entry in given for p in (entry["params"] if isinstance(entry, dict) else [entry])]
    common = [parameter.shape[0] for parameter in parameters if owner_of(parameter) is None]
    if common:
        return common[0]
    if not parameters:
        raise ConfigError("an optimizer without parameters: pass array.parameters()")
    return 1 + max(owner_of(parameter) or 0 for parameter in parameters)
