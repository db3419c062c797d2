# SPDX-License-Identifier: Apache-2.0
"""Several optimizers as one: each moves parameters of its own."""

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
    """The state of several optimizers, by parameter; each keeps its own."""

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

    Muon moves matrices, and AdamW beside it all other parameters; strategies see one vector all the same. Parameter
    groups are the optimizers' own, one after another, so that a scheduler of this one moves all their learning rates.

    Args:
        optimizers: two or more; no parameter is in two of them.

    Raises:
        ConfigError: fewer than two, a parameter in two of them, or one that needs the loop for itself.

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
            raise ConfigError(f"{len(optimizers)} optimizers: there must be two or more; use a single one as it is")
        for each in optimizers:
            alone = isinstance(each, LBFGS | CombinedOptimizer) or hasattr(each, "evaluating")
            if alone or getattr(each, "evaluates_several_gradients", False):
                raise ConfigError(f"{type(each).__name__}: its steps cannot be taken beside others; attach it alone")
        self.optimizers = optimizers
        held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        if len(set(held)) < len(held):
            twice = len(held) - len(set(held))
            raise ConfigError(f"{twice} parameters are in two optimizers; give each parameter to one of them")
        self._states = _States(optimizers)
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The optimizers' own, by parameter."""
        return self._states

    @state.setter
    def state(self, _: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Torch's constructor begins with an empty state; these optimizers may have taken steps before.
        pass

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of each optimizer, in their order; a closure is called once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Give each optimizer its part of what `state_dict` returned."""
        groups, first = list(state_dict["param_groups"]), 0
        if len(groups) != len(self.param_groups):
            raise ValueError(f"a state of {len(groups)} parameter groups, but there are {len(self.param_groups)}")
        for each in self.optimizers:
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            numbers = {number for group in own for number in group["params"]}
            held = {number: state for number, state in state_dict["state"].items() if number in numbers}
            each.load_state_dict({"state": held, "param_groups": own})
            # Loading makes new groups.
            self.param_groups[first : first + len(own)] = each.param_groups
            first += len(own)
