# SPDX-License-Identifier: Apache-2.0
"""Steps of adaptive optimizers by torch, over lists of tensors of any shapes.

On a CPU norms are summed in the order of the compiled kernels; elsewhere in torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.reference.bits import exact_sqrt, tree_sums


def lamb_direction_(
    momenta: list[Tensor],
    before: list[Tensor],
    frozen: list[Tensor],
    fresh: list[Tensor],
    parameters: list[Tensor],
    numbers: Sequence[float],
) -> Tensor:
    """Replace momenta by directions; returns each tensor's largest ratio and, with decay, two norms, [3, k].

    `numbers` are those of `thinwire.kernels.adaptive.lamb_direction_`.
    """
    beta1, beta2, fresh_weight, eps, decay = numbers
    gradients = torch._foreach_sub(momenta, torch._foreach_mul(before, beta1))  # pyright: ignore
    torch._foreach_mul_(fresh, beta2)  # pyright: ignore
    squares = torch._foreach_mul(gradients, gradients)  # pyright: ignore
    torch._foreach_add_(fresh, torch._foreach_mul(squares, fresh_weight))  # pyright: ignore
    torch._foreach_copy_(before, momenta)  # pyright: ignore
    denominators = _denominators(frozen, eps)
    ratios = torch._foreach_div(denominators, _denominators(fresh, eps))  # pyright: ignore
    largest = torch.stack(torch._foreach_max(ratios))  # pyright: ignore
    torch._foreach_div_(momenta, denominators)  # pyright: ignore
    if not decay:
        return torch.stack([largest, *torch.zeros_like(largest).expand(2, -1)])
    plain = _norms(momenta)
    torch._foreach_add_(momenta, torch._foreach_mul(parameters, decay))  # pyright: ignore
    return torch.stack([largest, plain, _norms(momenta)])


def scaled_step_(parameters: list[Tensor], directions: list[Tensor], ratios: Tensor, rate: float) -> None:
    """Step by rate times ratio along each direction; the directions are overwritten."""
    torch._foreach_mul_(directions, list(ratios.unbind()))  # pyright: ignore
    torch._foreach_mul_(directions, rate)  # pyright: ignore
    torch._foreach_sub_(parameters, directions)  # pyright: ignore


def frozen_adam_step_(
    parameters: list[Tensor],
    before: list[Tensor],
    momenta: list[Tensor],
    frozen: list[Tensor],
    numbers: Sequence[float],
) -> None:
    """Step along Adam's direction; `numbers` are those of `thinwire.kernels.adaptive.frozen_adam_step_`."""
    eps, decay, rate = numbers
    directions = torch._foreach_div(momenta, _denominators(frozen, eps))  # pyright: ignore
    if decay:
        torch._foreach_add_(directions, torch._foreach_mul(parameters, decay))  # pyright: ignore
    torch._foreach_copy_(before, momenta)  # pyright: ignore
    torch._foreach_mul_(directions, rate)  # pyright: ignore
    torch._foreach_sub_(parameters, directions)  # pyright: ignore


def _denominators(variances: list[Tensor], eps: float) -> list[Tensor]:
    on_cpu = variances[0].device.type == "cpu"
    roots = list(map(_sqrt, variances)) if on_cpu else torch._foreach_sqrt(variances)  # pyright: ignore
    return list(torch._foreach_add(roots, eps))  # pyright: ignore


def _sqrt(x: Tensor) -> Tensor:
    return exact_sqrt(x) if x.dtype == torch.float32 else x.sqrt()


def _norms(tensors: list[Tensor]) -> Tensor:
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors))  # pyright: ignore
    return torch.stack([_sqrt(tree_sums(x.square().reshape(1, -1))[0]) for x in tensors])
