"""An outer optimizer for the average of the parameters: any of torch's, with its state in the strategy's state."""

from __future__ import annotations

import ast
from collections.abc import MutableMapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.registry import registered

_PREFIX = "outer."


@registered
class OuterOptimizer:
    r"""The outer optimizer of `SlowMo`: one step of a torch optimizer per round, on the workers' average.

    A round is the local steps between two averages of the parameters. With $x_0$ the parameters at the start of a round
    and $\bar x$ the average at its end, the optimizer steps from $x_0$ with $x_0 - \bar x$ as gradient. This gradient
    is not divided by the workers' learning rate; in slow momentum it is.

    Args:
        optimizer: the name of a class in `torch.optim`, such as "SGD" or "AdamW".
        lr: the outer learning rate, which is constant; plain SGD with 1 sets the parameters to the average.
        momentum: the optimizer's momentum; None leaves its default.
        nesterov: whether SGD uses Nesterov momentum.
        options: further arguments of the optimizer, as text, such as "betas=(0.9, 0.95), weight_decay=0.1".

    Example:
        >>> import torch
        >>> import thinwire
        >>> x, state = torch.tensor([1.0]), {}
        >>> for _ in range(2):
        ...     thinwire.OuterOptimizer("SGD", lr=1.0, momentum=0.5).step_(x, torch.tensor([0.25]), state)
        >>> x, state
        (tensor([0.3750]), {'outer.momentum_buffer': tensor([0.3750])})
    """

    optimizer: str = "SGD"
    lr: float = 0.7
    momentum: float | None = None
    nesterov: bool = False
    options: str = ""

    def __post_init__(self) -> None:
        """Check the types, and that the optimizer works, by two steps on zeros."""
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"outer lr={self.lr}: must be positive and finite; 0.7 is usual")
        x = torch.zeros(2)
        # Twice, because some optimizers fail only with the state of a first step.
        self.step_(x, torch.zeros(2), state := dict[str, Tensor]())
        self.step_(x, torch.zeros(2), state)

    def step_(self, x: Tensor, gradient: Tensor, state: MutableMapping[str, Tensor]) -> None:
        """Move `x` by one step; the optimizer's state is read from and written to `state`, with the prefix "outer.".

        Raises:
            ConfigError: torch has no such optimizer, or it does not work with these arguments.
        """
        # Constructed at every step, because a frozen recipe cannot hold an optimizer; only its state is kept.
        parameter = nn.Parameter(x)
        optimizer = self._make(parameter)
        saved = {name.removeprefix(_PREFIX): each for name, each in state.items() if name.startswith(_PREFIX)}
        if saved:
            # Vectors lie with the parameters; torch keeps numbers such as step counters on the CPU.
            optimizer.state[parameter] = {
                name: each.to(x.device if each.shape == x.shape else "cpu") for name, each in saved.items()
            }
        parameter.grad = gradient
        try:
            optimizer.step()
        except (TypeError, RuntimeError) as error:
            raise self._refusal(f"its step needs more than a gradient ({error})") from error
        # Checkpoints hold tensors only, so the state must consist of tensors.
        for name, each in optimizer.state[parameter].items():
            if isinstance(each, Tensor):
                state[_PREFIX + name] = each
            elif each is not None:
                raise self._refusal(f"its state {name} is no tensor")

    def _make(self, parameter: nn.Parameter) -> Optimizer:
        kind: Any = _optimizer_class(self.optimizer)
        try:
            call = ast.parse(f"options({self.options})", mode="eval").body
            assert isinstance(call, ast.Call) and not call.args, "they have no names"
            options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        except (SyntaxError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"outer options={self.options!r}: cannot be read ({error}); write them like betas=(0.9, 0.95)"
            ) from None
        arguments: dict[str, Any] = {"lr": self.lr, **options}
        if self.momentum is not None:
            arguments["momentum"] = self.momentum
        if self.nesterov:
            arguments["nesterov"] = True
        try:
            made: Optimizer = kind([parameter], **arguments)
        except (TypeError, ValueError) as error:
            raise self._refusal(str(error)) from error
        return made

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self}: {reason}; use another optimizer or other arguments, such as OuterOptimizer('SGD', lr=0.7)"
        )


def _optimizer_class(name: str) -> type[Optimizer]:
    found = getattr(torch.optim, name, None)
    if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer:
        return found
    known = [word for word in dir(torch.optim) if isinstance(getattr(torch.optim, word), type) and word != "Optimizer"]
    lowered = {word.lower(): word for word in known}
    close = get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    hint = f"; did you mean {lowered[close[0]]}?" if close else ""
    raise ConfigError(f"outer optimizer={name!r}: torch.optim has no such optimizer{hint} (known: {', '.join(known)})")
