# SPDX-License-Identifier: Apache-2.0
"""Parameters that an optimizer updates together, and arithmetic of lists of tensors with one coefficient per model.

Tensors are [models, ...]. If all models have the same coefficient, torch's own arithmetic with a number is used: it is
faster, and rounds like `torch.optim`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.arrays.fusion.store import column, owner_of
from thinwire.core.kernels.base import on_gpu
from thinwire.core.torch_internals import foreach
from thinwire.errors import ConfigError

Group = dict[str, Any]
Tensors = list[Tensor]


@dataclass(slots=True)
class ParameterBatch:
    """Parameters of one group that have taken the same numbers of steps and are updated together.

    Args:
        parameters: each [models, ...].
        gradients: in the same order; not to be changed.
        states: each named state of the parameters, in the same order.
        values: hyperparameters, float64 vectors [models] on the device of the parameters.
        steps: each model's number of steps, this one included; float64 [models], as `values`.
        group: the parameter group, for options that all models share.
    """

    parameters: Tensors
    gradients: Tensors
    states: dict[str, Tensors]
    values: dict[str, Tensor]
    steps: Tensor
    group: Group

    def decayed_gradients(self) -> Tensors:
        """Return the gradients with weight decay added, as L2 regularisation."""
        decay = self.values["weight_decay"]
        if is_zero(decay):
            return self.gradients
        return plus(self.gradients, self.parameters, decay)

    def in_memory_order(self) -> ParameterBatch:
        """Return the batch with the axes of each tensor permuted as in memory: channels-last weights are contiguous."""
        orders = [_memory_order(parameter) for parameter in self.parameters]

        def permuted(column: Tensors) -> Tensors:
            return [tensor.permute(order) for tensor, order in zip(column, orders, strict=True)]

        states = {name: permuted(column) for name, column in self.states.items()}
        return replace(self, parameters=permuted(self.parameters), gradients=permuted(self.gradients), states=states)

    def fits_row_kernels(self) -> bool:
        """Return True if all tensors are contiguous and of one dtype and device that the row kernels support."""
        first = self.parameters[0]
        columns = (self.parameters, *self.states.values())
        return (
            first.dtype in (torch.float32, torch.float64)
            and (on_host(first) or on_gpu(first))
            and all(
                tensor.device == first.device and tensor.dtype == first.dtype and tensor.is_contiguous()
                for column in columns
                for tensor in column
            )
        )


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the axes with the models' first and the others by stride; those of a contiguous tensor as they are."""
    axes = range(1, tensor.dim())
    return [0, *(axes if tensor.is_contiguous() else sorted(axes, key=lambda axis: -tensor.stride(axis)))]


def on_host(tensor: Tensor) -> bool:
    """Return True if the host may read a tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def is_zero(vector: Tensor) -> bool:
    """Whether a hyperparameter is known to be zero for all models; one on a device is not read, and not known."""
    return on_host(vector) and not bool(vector.any())


class DeviceValues:
    """A device's copy of the vectors that users edit on the CPU.

    The copy stays at one address, which a captured graph reads, and is refreshed without waiting for the device.

    Args:
        device: which is not the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: Tensor | None = None
        self._rows: Tensor | None = None
        self.values: dict[str, Tensor] = {}

    def refresh(self, values: dict[str, Tensor], active: Tensor) -> None:
        """Copy the vectors if they differ from those of the last call."""
        rows = torch.stack([*values.values(), active.double()])
        if self._host is not None and torch.equal(rows, self._host):
            return
        # The allocator of pinned memory reuses a block only after the copy from it has finished.
        pinned = rows.pin_memory() if self._device.type == "cuda" and torch.cuda.is_available() else rows
        self._host = rows
        if self._rows is None or self._rows.shape != rows.shape:
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)
            self.active = torch.empty(active.shape, dtype=torch.bool, device=self._device)
            self.values = dict(zip(values, self._rows.unbind(), strict=False))
        self._rows.copy_(pinned, non_blocking=True)
        self.active.copy_(self._rows[-1])


@contextmanager
def inactive_unchanged(columns: Sequence[Tensors], active: Tensor) -> Generator[None]:
    """Inside, all slots may be written to; afterwards those that are not active are restored, bitwise."""
    if not on_host(active):
        before = [(tensor, tensor.clone()) for column in columns for tensor in column]
        yield
        for tensor, held in before:
            tensor.copy_(torch.where(column(active, tensor), tensor, held))
        return
    stopped = (~active).nonzero().flatten()
    tensors = [tensor for column in columns for tensor in column] if len(stopped) else []
    held = [tensor[stopped.to(tensor.device)] for tensor in tensors]
    yield
    for tensor, rows in zip(tensors, held, strict=True):
        tensor[stopped.to(tensor.device)] = rows


def slots_of(parameter: Tensor) -> slice:
    """Return the slots whose hyperparameters update a parameter: all, or the one that has it."""
    owner = owner_of(parameter)
    return slice(None) if owner is None else slice(owner, owner + 1)


def count_models(given: Sequence[Any]) -> int:
    """Find the number of models from parameters or groups of them."""
    parameters = [p for entry in given for p in (entry["params"] if isinstance(entry, dict) else [entry])]
    common = [parameter.shape[0] for parameter in parameters if owner_of(parameter) is None]
    if common:
        return common[0]
    if not parameters:
        raise ConfigError("an optimizer without parameters: pass array.parameters()")
    return 1 + max(0, *(owner_of(parameter) or 0 for parameter in parameters))


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _coefficient(vector: Tensor, tensors: Sequence[Tensor]) -> float | Tensors:
    """Return the number that all models share, or each model's own number in the shape of every tensor.

    One number is what torch's fast paths take. Numbers that are on a GPU are never compared, which would wait for it.
    """
    if on_host(vector):
        first = float(vector[0])
        if bool((vector == first).all()):
            return first
    made: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    found: Tensors = []
    for tensor in tensors:
        key = torch.promote_types(tensor.dtype, torch.float32), tensor.device
        if key not in made:
            made[key] = vector.to(tensor.device, key[0])
        found.append(column(made[key], tensor))
    return found


def scale_(tensors: Tensors, by: Tensor) -> None:
    """Multiply each model's rows by its number."""
    foreach.mul_(tensors, _coefficient(by, tensors))


def divide_(tensors: Tensors, by: Tensor) -> None:
    """Divide each model's rows by its number."""
    foreach.div_(tensors, _coefficient(by, tensors))


def shift_(tensors: Tensors, by: Tensor) -> None:
    """Add its number to each model's rows."""
    foreach.add_(tensors, _coefficient(by, tensors))


def add_(tensors: Tensors, others: Tensors, by: Tensor) -> None:
    """Add others times each model's number."""
    own = _coefficient(by, others)
    if isinstance(own, float):
        foreach.add_(tensors, others, alpha=own)
    else:
        foreach.add_(tensors, foreach.mul(others, own))


def plus(tensors: Tensors, others: Tensors, by: Tensor) -> Tensors:
    """Return tensors plus others times each model's number."""
    own = _coefficient(by, others)
    if isinstance(own, float):
        return list(foreach.add(tensors, others, alpha=own))
    return list(foreach.add(tensors, foreach.mul(others, own)))


def lerp_(tensors: Tensors, others: Tensors, by: Tensor) -> None:
    """Move towards others by each model's number."""
    own = _coefficient(by, tensors)
    if isinstance(own, float):
        foreach.lerp_(tensors, others, own)
    else:
        foreach.add_(tensors, foreach.mul(foreach.sub(others, tensors), own))


def addcmul_(tensors: Tensors, ones: Tensors, others: Tensors, by: Tensor) -> None:
    """Add each model's number times one times other."""
    own = _coefficient(by, ones)
    if isinstance(own, float):
        foreach.addcmul_(tensors, ones, others, own)
    else:
        foreach.add_(tensors, foreach.mul(foreach.mul(ones, own), others))


def addcdiv_(tensors: Tensors, ones: Tensors, others: Tensors, by: Tensor) -> None:
    """Add each model's number times one divided by other."""
    own = _coefficient(by, ones)
    if isinstance(own, float):
        foreach.addcdiv_(tensors, ones, others, own)
    else:
        foreach.add_(tensors, foreach.div(foreach.mul(ones, own), others))
