# SPDX-License-Identifier: Apache-2.0
"""Models trained separately, one after another, by plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Factory = Callable[..., nn.Module]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch draws as after `torch.manual_seed`; its generator is restored afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def make(factory: Factory, count: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Module]:
    """Make models whose weights and buffers all differ."""
    models: list[nn.Module] = []
    for index in range(count):
        with seeded(100 * seed + index):
            model = factory().to(dtype)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.is_floating_point() and tensor.dim() < 2:
                    with torch.no_grad():
                        tensor.add_(torch.rand_like(tensor))
                if "padding" in name:
                    tensor.zero_()
            models.append(model)
    return models


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 7) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def passed(
    models: Sequence[nn.Module], inputs: Sequence[Sequence[Any]], seeds: Sequence[int] | None = None
) -> tuple[list[Any], list[dict[str, Tensor]]]:
    """Return each model's outputs on its own inputs, and the gradients of a loss that depends on every output."""
    outputs: list[Any] = []
    for index, (model, own) in enumerate(zip(models, inputs, strict=True)):
        model.zero_grad()
        with seeded(0 if seeds is None else seeds[index]):
            output = model(*own)
        weighed(output).backward()
        outputs.append(output)
    return outputs, [gradients(model) for model in models]


def weighed(output: Any) -> Tensor:
    """Return a scalar that depends differently on every entry."""
    leaves = [leaf for leaf in (output if isinstance(output, tuple) else (output,)) if isinstance(leaf, Tensor)]
    total = torch.zeros((), dtype=leaves[0].dtype)
    for leaf in leaves:
        if leaf.is_floating_point():
            ramp = torch.linspace(-1, 1, leaf.numel(), dtype=leaf.dtype).view(leaf.shape)
            total = total + (leaf * ramp + 0.3 * leaf**2).sum()
    return total


def trained(
    model: nn.Module,
    optimizer: Optimizer,
    steps: int,
    loss: Callable[[nn.Module, int], Tensor],
    *,
    scheduler: Any = None,
    max_norm: float | None = None,
    seed: int = 0,
) -> list[float]:
    """Train a plain model; returns the losses."""
    losses: list[float] = []
    with seeded(seed):
        for step in range(steps):
            optimizer.zero_grad()
            found = loss(model, step)
            found.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(float(found.detach()))
            elif scheduler is not None:
                scheduler.step()
            losses.append(float(found.detach()))
    return losses


class LoopedLamb:
    """LAMB of one model, written from Algorithm 2, tensor after tensor."""

    def __init__(
        self, model: nn.Module, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.parameters, self.settings = list(model.parameters()), (lr, *betas, eps, weight_decay)
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.t = 0

    def step(self) -> None:
        lr, first, second, eps, decay = self.settings
        self.t += 1
        for place, parameter in enumerate(self.parameters):
            gradient, x = parameter.grad, parameter.detach()
            assert gradient is not None
            self.m[place] = first * self.m[place] + (1 - first) * gradient
            self.v[place] = second * self.v[place] + (1 - second) * gradient**2
            direction = (self.m[place] / (1 - first**self.t)) / ((self.v[place] / (1 - second**self.t)).sqrt() + eps)
            direction = direction + decay * x
            ratio = x.norm() / direction.norm()
            ratio = ratio.clamp(0.01, 10.0) if x.norm() > 0 and direction.norm() > 0 else torch.ones(())
            x -= lr * ratio * direction

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def one_of(settings: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return one model's hyperparameters from those of all models."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, tuple):
            found[name] = tuple(entry[index] if isinstance(entry, list) else entry for entry in value)
        else:
            found[name] = value[index] if isinstance(value, list) else value
    return found


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def copies(models: Sequence[nn.Module]) -> list[nn.Module]:
    return [copy.deepcopy(model) for model in models]
