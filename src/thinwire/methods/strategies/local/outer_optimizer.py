# SPDX-License-Identifier: Apache-2.0
"""An outer optimizer for averages of parameters, whose state is part of the strategy's state."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, MutableMapping
from difflib import get_close_matches
from importlib import import_module
from inspect import isfunction
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.registry import parsed, registered

_PREFIX = "outer."
_TORCH = "torch.optim"


@registered
class OuterOptimizer:
    r"""The outer optimizer of `DiLoCo`, which takes one step per round on the workers' average.

    With $x_0$ the parameters at the start of a round and $\bar x$ the average at its end, the optimizer steps from
    $x_0$ with $x_0 - \bar x$ as gradient. This gradient is not divided by the workers' learning rate, unlike in
    `SlowMo`.

    Recipes name the optimizer, and its arguments are literals. An object of another module is called only if it is an
    optimizer class, or a function that is annotated to return an optimizer.

    Args:
        optimizer: a class in `torch.optim`, such as "SGD" or "AdamW"; or "module:Name", an `Optimizer` class or a
            function of a list of parameters that is annotated to return an `Optimizer`, importable on all ranks.
        lr: the outer learning rate, which is constant; plain SGD with 1 sets the parameters to the average.
        arguments: further arguments of the optimizer by name, such as `betas=(0.9, 0.95)`: numbers, strings, booleans,
            None, and tuples of these.

    Raises:
        ConfigError: no such optimizer exists, it does not accept these arguments, or one of them is not a literal.

    Example:
        >>> import torch
        >>> import thinwire
        >>> outer = thinwire.OuterOptimizer("SGD", lr=1.0, momentum=0.5)
        >>> x, state = torch.tensor([1.0]), {}
        >>> for _ in range(2):
        ...     outer.step_(x, torch.tensor([0.25]), state)
        >>> x, state
        (tensor([0.3750]), {'outer.momentum_buffer': tensor([0.3750])})
        >>> thinwire.parse("DiLoCo(outer=OuterOptimizer('SGD', lr=1.0, momentum=0.5))").outer == outer
        True
    """

    optimizer: str
    lr: float
    arguments: tuple[tuple[str, Any], ...]

    # Written out because a dataclass cannot take arguments of any name.
    def __init__(self, optimizer: str = "SGD", lr: float = 0.7, **arguments: Any) -> None:
        for name, value in (
            ("optimizer", optimizer),
            ("lr", lr),
            # Sorted, so that recipes do not depend on the order of arguments.
            ("arguments", tuple(sorted(arguments.items()))),
        ):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self.arguments)
        return f"OuterOptimizer(optimizer={self.optimizer!r}, lr={self.lr!r}{arguments})"

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", self.optimizer.removeprefix(f"{_TORCH}:"))
        if not re.fullmatch(r"(\w+(\.\w+)*:)?\w+", self.optimizer):
            raise ConfigError(f"outer optimizer={self.optimizer!r}: must be a name in torch.optim, or 'module:Name'")
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"outer lr={self.lr}: must be positive and finite. 0.7 is usual")
        for name, value in self.arguments:
            if not _is_literal(value):
                raise ConfigError(
                    f"outer {name}={value!r}: must be a number, a string, True, False, None or a tuple of these, so "
                    "that a recipe can hold it"
                )
        x = torch.zeros(2, dtype=torch.float32, device="cpu")
        # Twice, because some optimizers fail only with the state of a first step.
        self.step_(x, torch.zeros(2, dtype=torch.float32, device="cpu"), state := dict[str, Tensor]())
        self.step_(x, torch.zeros(2, dtype=torch.float32, device="cpu"), state)

    @property
    def module(self) -> str | None:
        """The module in the optimizer's name; None for torch's own optimizers."""
        return self.optimizer.rpartition(":")[0] or None

    @property
    def momentum(self) -> float | None:
        """The momentum of SGD, in [0, 1); None for other optimizers, and with dampening."""
        arguments = dict(self.arguments)
        momentum = arguments.get("momentum", 0.0)
        plain = self.optimizer == "SGD" and not arguments.get("dampening") and 0 <= momentum < 1
        return momentum if plain else None

    def is_elementwise(self) -> bool:
        """Return True if steps on parts of a vector equal those on the whole; False with norms, as in LAMB."""

        def moved(x: Tensor) -> Tensor:
            x, state = x.clone(), dict[str, Tensor]()
            for scale in (1.0, -0.5):
                self.step_(x, (scale * x).cos(), state)
            return x

        x = torch.linspace(-3, 5, 8, dtype=torch.float64, device="cpu")
        return torch.allclose(moved(x), torch.cat([moved(part) for part in x.split(3)]), rtol=1e-9, atol=1e-12)

    def step_(self, x: Tensor, gradient: Tensor, state: MutableMapping[str, Tensor]) -> None:
        """Take one step on `x`, in place, with the optimizer's state in `state` under the prefix "outer.".

        Raises:
            ConfigError: no such optimizer exists, or it does not accept these arguments.
        """
        # A frozen recipe cannot hold an optimizer, so it is created for each step; only its state is kept.
        parameter, make = nn.Parameter(x), _found(self.optimizer)
        try:
            optimizer = make([parameter], lr=self.lr, **dict(self.arguments))
        except (TypeError, ValueError) as error:
            raise self._refusal(str(error)) from error
        if not isinstance(optimizer, Optimizer):
            raise self._refusal(f"returned a {type(optimizer).__name__}, not an Optimizer")
        saved = {name.removeprefix(_PREFIX): each for name, each in state.items() if name.startswith(_PREFIX)}
        if saved:
            # Vectors are on the device of the parameters; torch keeps step counters on the CPU.
            optimizer.state[parameter] = {
                name: each.to(x.device if each.shape == x.shape else "cpu") for name, each in saved.items()
            }
        parameter.grad = gradient
        try:
            # Otherwise torch would create step counters on the default device.
            with torch.device("cpu"):
                optimizer.step()
        except (TypeError, RuntimeError) as error:
            raise self._refusal(f"its step needs more than a gradient ({error})") from error
        # Checkpoints hold tensors only, so the state must consist of tensors.
        for name, each in optimizer.state[parameter].items():
            if isinstance(each, Tensor):
                state[_PREFIX + name] = each
            elif each is not None:
                raise self._refusal(f"its state {name} is not a tensor")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self}: {reason}. Use another optimizer or other arguments, such as OuterOptimizer('SGD', lr=0.7)"
        )


def _is_literal(value: object) -> bool:
    """Return True if a value is hashable, and a recipe can contain it."""
    try:
        hash(value)
        return ast.literal_eval(parsed(repr(value))) == value
    except (TypeError, ValueError, SyntaxError):
        return False


def _found(name: str) -> Callable[..., object]:
    """Return the named optimizer class, or the function that creates one.

    Raises:
        ConfigError: the name does not exist, or is something else.
    """
    module_name, _, name = name.rpartition(":")
    where = f"outer optimizer={f'{module_name}:{name}' if module_name else name!r}"
    try:
        module: Any = import_module(module_name or _TORCH)
    except ImportError as error:
        raise ConfigError(f"{where}: {error}. Name a module that is importable on all ranks") from error
    found: Any = getattr(module, name, None)
    if _makes_optimizers(found):
        return found
    if found is not None:
        raise ConfigError(
            f"{where}: is {found!r}. It must be a subclass of Optimizer, or a function annotated to return an Optimizer"
        )
    known = [word for word in dir(module) if _makes_optimizers(getattr(module, word, None))]
    lowered = {word.lower(): word for word in known}
    close = get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    hint = f"; did you mean {lowered[close[0]]}?" if close else ""
    raise ConfigError(f"{where}: {module.__name__} has no such optimizer{hint} (known: {', '.join(known)})")


def _makes_optimizers(found: Any) -> bool:
    """Return True for an optimizer class, or a function annotated to return an optimizer."""
    if isfunction(found):
        try:
            found = get_type_hints(found).get("return")
        except (NameError, TypeError):
            return False
        return isinstance(found, type) and issubclass(found, Optimizer)
    return isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
