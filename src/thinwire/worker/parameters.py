"""Which parameters the optimizer moves, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.replica.flat import Segment


def trained(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer moves, by their name in the model, in the model's order.

    Raises:
        ConfigError: the optimizer holds parameters of another model, none of this one, or ones that are not dense.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {name: p for name, p in model.named_parameters() if id(p) in held and p.requires_grad}
    strangers = len(held - {id(p) for p in model.parameters()})
    if strangers:
        raise ConfigError(f"the optimizer holds {strangers} parameters that are not the model's; attach their model")
    if not named:
        raise ConfigError("the optimizer holds no trainable parameter of this model; pass model.parameters() to it")
    for name, parameter in named.items():
        if parameter.is_sparse or parameter.layout != torch.strided:
            raise ConfigError(f"{name} has layout {parameter.layout}: only dense parameters can be trained")
    return named


def by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    """Tensors by dtype and device, each kind in the order given."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x)
    return kinds


def learning_rate(
    optimizer: Optimizer, parameters: list[nn.Parameter], segments: tuple[Segment, ...], x: Tensor
) -> Callable[[], float | Tensor]:
    """Reads the optimizer's learning rate: a number, or a vector like `x` where groups differ in it."""
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    indices = [group_of[id(p)] for p in parameters]
    sizes = torch.tensor([segment.size for segment in segments], device=x.device)

    def read() -> float | Tensor:
        rates = [float(optimizer.param_groups[i]["lr"]) for i in indices]
        if len(set(rates)) == 1:
            return rates[0]
        return torch.tensor(rates, dtype=x.dtype, device=x.device).repeat_interleave(sizes)

    return read
