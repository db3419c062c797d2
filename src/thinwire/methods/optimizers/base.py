# SPDX-License-Identifier: Apache-2.0
"""Helpers of optimizers: closures, cache-sized batches of parameters, and state that keeps its dtype."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.flat import copy_each_

T = TypeVar("T")
_BATCH_ELEMENTS = 1 << 20  # 4 MB in fp32


@overload
def evaluate(closure: None) -> None: ...


@overload
def evaluate(closure: Callable[[], T]) -> T: ...


def evaluate(closure: Callable[[], T] | None) -> T | None:
    """Call a closure with gradients enabled, since `step` disables them, and return its loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class ClosureOptimizer(Optimizer):
    """An optimizer whose `step(closure)` evaluates the closure first and then calls `update`."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step along the current gradients.

        Args:
            closure: recomputes the loss and its gradients, as in torch.

        Returns:
            The closure's loss; None without a closure.
        """
        loss = evaluate(closure)
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """Move the parameters by one step; called by `step`, with gradients disabled."""


def cache_batches(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters in order, in batches that fit the cache, so that only the first pass reads memory.

    On accelerators, where launches are expensive, all parameters are one batch.
    """
    batch: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if batch and parameter.device.type == "cpu" and size + parameter.numel() > _BATCH_ELEMENTS:
            yield batch
            batch, size = [], 0
        batch.append(parameter)
        size += parameter.numel()
    if batch:
        yield batch


def restore_dtypes(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Undo torch's cast on loading, which casts a parameter's state to the parameter's dtype."""
    # State is saved under the number of each parameter; parameters keep their order within the groups.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[parameter][name] = value.to(parameter.device, copy=True)


def zero_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Make momentum and variance in fp32 at least, and for 16-bit parameters an fp32 `master` copy."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    state = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("momentum", "variance")}
    if parameter.dtype != dtype:
        state["master"] = parameter.detach().to(dtype)
    return state


def exact_parameters(parameters: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Return the tensors that a step updates: `master` copies of 16-bit parameters, others themselves.

    Entries that changed since the last step, for example when a strategy averaged them, are copied into the master
    copy; otherwise the step would undo the change. All others keep the digits that the parameter cannot represent.
    """
    exact: list[Tensor] = []
    for parameter, state in zip(parameters, states, strict=True):
        master = state.get("master")
        if master is not None:
            untouched = parameter == master.to(parameter.dtype)
            master.copy_(torch.where(untouched, master, parameter.to(master.dtype)))
        exact.append(parameter if master is None else master)
    return exact


def round_to_parameters(exact: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Copy the `master` copies in the result of `exact_parameters` into their 16-bit parameters."""
    rounded = [(p, x) for p, x in zip(parameters, exact, strict=True) if p is not x]
    if rounded:
        copy_each_([p for p, _ in rounded], [x for _, x in rounded])
