"""An optimizer for the parameters' average: any of torch's, its state among the strategy's own."""

from __future__ import annotations

import ast
from collections.abc import MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.validation import check_kinds

_PREFIX = "outer."


@dataclass(frozen=True)
class OuterOptimizer:
    r"""One step of a torch optimizer on the average, with how far a round has come as its gradient.

    With $x_0$ where the round began and $\bar x$ the average at its end, the gradient is $x_0 - \bar x$: not divided by
    the workers' learning rate, as slow momentum is.

    Args:
        optimizer: the name of a class in `torch.optim`, such as "SGD" or "AdamW".
        lr: the outer learning rate, constant; 1 with plain SGD takes the average as it is.
        momentum: as that class takes it; None leaves its default.
        nesterov: as SGD takes it.
        options: its further arguments as text, such as "betas=(0.9, 0.95), weight_decay=0.1".
    """

    optimizer: str = "SGD"
    lr: float = 0.7
    momentum: float | None = None
    nesterov: bool = False
    options: str = ""

    def __post_init__(self) -> None:
        """Try it out on a few zeros."""
        check_kinds(self)
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"outer lr={self.lr}: must be positive and finite; 0.7 is usual")
        x = torch.zeros(2)
        self.step_(x, torch.zeros(2), state := dict[str, Tensor]())
        self.step_(x, torch.zeros(2), state)

    def step_(self, x: Tensor, gradient: Tensor, state: MutableMapping[str, Tensor]) -> None:
        """Move `x`, and what the optimizer remembers among `state`, under names that begin with "outer.".

        Raises:
            ConfigError: the optimizer is not to be had with these arguments.
        """
        parameter = nn.Parameter(x)
        optimizer = self._make(parameter)
        kept = {name.removeprefix(_PREFIX): each for name, each in state.items() if name.startswith(_PREFIX)}
        if kept:
            optimizer.state[parameter] = {name: _at_home(each, x) for name, each in kept.items()}
        parameter.grad = gradient
        try:
            optimizer.step()
        except (TypeError, RuntimeError) as error:
            raise self._refusal(f"its step asks for more than a gradient ({error})") from error
        for name, each in optimizer.state[parameter].items():
            if isinstance(each, Tensor):
                state[_PREFIX + name] = each
            elif each is not None:
                raise self._refusal(f"its state {name} is no tensor")

    def _make(self, parameter: nn.Parameter) -> Optimizer:
        kind: Any = _named(self.optimizer)
        given: dict[str, Any] = {"lr": self.lr, **self._options()}
        if self.momentum is not None:
            given["momentum"] = self.momentum
        if self.nesterov:
            given["nesterov"] = True
        try:
            made: Optimizer = kind([parameter], **given)
        except (TypeError, ValueError) as error:
            raise self._refusal(str(error)) from error
        return made

    def _options(self) -> dict[str, Any]:
        try:
            call = ast.parse(f"options({self.options})", mode="eval").body
            assert isinstance(call, ast.Call) and not call.args, "they have no names"
            return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        except (SyntaxError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"outer options={self.options!r}: cannot be read ({error}); write them like betas=(0.9, 0.95)"
            ) from None

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self}: {reason}; use another optimizer or other arguments, such as OuterOptimizer('SGD', lr=0.7)"
        )


def _named(name: str) -> type[Optimizer]:
    found = getattr(torch.optim, name, None)
    if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer:
        return found
    known = [word for word in dir(torch.optim) if isinstance(getattr(torch.optim, word), type) and word != "Optimizer"]
    lowered = {word.lower(): word for word in known}
    close = get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    hint = f"; did you mean {lowered[close[0]]}?" if close else ""
    raise ConfigError(f"outer optimizer={name!r}: torch.optim has no such optimizer{hint} (known: {', '.join(known)})")


def _at_home(kept: Tensor, x: Tensor) -> Tensor:
    """Vectors with the parameters, numbers such as step counters on the CPU, as torch keeps them."""
    return kept.to(x.device if kept.shape == x.shape else "cpu")
