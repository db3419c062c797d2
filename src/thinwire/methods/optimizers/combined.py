# SPDX-License-Identifier: Apache-2.0
"""Several optimizers as one; each moves its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from thinwire.core.replica.moments import Combined
from thinwire.errors import ConfigError


class _States(MutableMapping[Any, Any]):
    """The state of several optimizers, by parameter."""

    def __init__(self, optimizers: tuple[Optimizer, ...]) -> None:
        self._optimizers = optimizers
        self._owners = {p: each for each in optimizers for group in each.param_groups for p in group["params"]}

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._owners[parameter].state[parameter]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._owners[parameter].state[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._owners[parameter].state[parameter]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(list(each.state) for each in self._optimizers)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in each.state for each in self._optimizers)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)


class CombinedOptimizer(Combined):
    """Several optimizers with one `step`, one `zero_grad` and one `state_dict`, for one `attach` and one checkpoint.

    For example, Muon moves matrices, and AdamW moves all other parameters; strategies still see one vector. Parameter
    groups are those of the optimizers, in order, so that a scheduler of this optimizer changes all learning rates.

    Args:
        optimizers: two or more optimizers without common parameters.

    Raises:
        ConfigError: there are fewer than two, a parameter is in two of them, or one cannot be combined.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 4)
        >>> muon = torch.optim.Muon([model.weight], lr=0.02)
        >>> adamw = torch.optim.AdamW([model.bias], lr=0.001)
        >>> optimizer = thinwire.CombinedOptimizer(muon, adamw)
        >>> worker = thinwire.attach(model, optimizer, thinwire.DiLoCo(period=30))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> [group["lr"] for group in optimizer.param_groups], len(optimizer.state_dict()["state"])
        ([0.02, 0.001], 2)
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if len(optimizers) < 2:
            raise ConfigError(
                f"{len(optimizers)} optimizers: must be two or more. Attach a single optimizer without "
                "CombinedOptimizer"
            )
        for each in optimizers:
            alone = isinstance(each, LBFGS | CombinedOptimizer) or hasattr(each, "evaluating")
            if alone or getattr(each, "evaluates_several_gradients", False):
                raise ConfigError(
                    f"{type(each).__name__}: it cannot be combined with other optimizers. Attach it alone"
                )
        self.optimizers = optimizers
        held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        if len(set(held)) < len(held):
            twice = len(held) - len(set(held))
            raise ConfigError(f"{twice} parameters are in two optimizers: each must be in one. Remove the duplicates")
        self._states = _States(optimizers)
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state of the optimizers, by parameter."""
        return self._states

    @state.setter
    def state(self, _: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Torch's constructor sets an empty state; these optimizers may have taken steps already.
        pass

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step of each optimizer, in order; a closure is called once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load each optimizer's part of a result of `state_dict`."""
        groups, first = list(state_dict["param_groups"]), 0
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups: must be {len(self.param_groups)}. Load "
                "the state of the same optimizers"
            )
        for each in self.optimizers:
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            numbers = {number for group in own for number in group["params"]}
            held = {number: state for number, state in state_dict["state"].items() if number in numbers}
            each.load_state_dict({"state": held, "param_groups": own})
            # Loading creates new groups.
            self.param_groups[first : first + len(own)] = each.param_groups
            first += len(own)
