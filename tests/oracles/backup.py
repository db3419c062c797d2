# SPDX-License-Identifier: Apache-2.0
"""Backup workers and asynchronous SGD from their algorithm boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, int, int], Tensor]
"""Of (model, rank, step)."""


def backup_workers(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, log: Sequence[Sequence[int]], *, clip: float = inf
) -> Tensor:
    """Algorithms 3 and 4 by one process: at every step the mean of the members' gradients, at the same parameters."""
    parameters = list(model.parameters())
    for step, members in enumerate(log):
        rows = [torch.autograd.grad(loss(model, rank, step), parameters) for rank in members]
        for parameter, *gradients in zip(parameters, *rows, strict=True):
            total = gradients[0].clone()
            for gradient in gradients[1:]:
                total += gradient
            parameter.grad = total / len(members)
        if clip < inf:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return torch.cat([parameter.detach().view(-1) for parameter in parameters])


def async_sgd(
    gradient: Callable[[int, Tensor], Tensor], x: Tensor, rate: float, order: Sequence[int], *, scaled: bool = False
) -> tuple[Tensor, list[int]]:
    """Async-Opt, event by event: gradients are of what their worker read last. Returns x and stalenesses."""
    read, seen, ages = dict[int, Tensor](), dict[int, int](), list[int]()
    for version, rank in enumerate(order):
        age = version - seen.get(rank, 0)
        ages.append(age)
        x = x - rate / (max(1, age) if scaled else 1) * gradient(rank, read.get(rank, torch.zeros_like(x)))
        read[rank], seen[rank] = x, version + 1
    return x, ages
