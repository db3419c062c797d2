# SPDX-License-Identifier: Apache-2.0
"""Steps of adaptive optimizers in torch, over lists of tensors of any shapes.

On a CPU, norms are summed in the order of the compiled kernels; elsewhere in torch's own order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import exact_sqrt, tree_sums
from thinwire.core.torch_internals import foreach


def lamb_direction_(
    momenta: list[Tensor],
    before: list[Tensor],
    frozen: list[Tensor],
    fresh: list[Tensor],
    parameters: list[Tensor],
    numbers: Sequence[float],
) -> Tensor:
    """Replace momenta with directions; return each tensor's largest ratio and, with decay, two norms, [3, k].

    `numbers` are those of `thinwire.core.kernels.adaptive.lamb_direction_`.
    """
    beta1, beta2, fresh_weight, eps, decay = numbers
    gradients = foreach.sub(momenta, foreach.mul(before, beta1))
    foreach.mul_(fresh, beta2)
    squares = foreach.mul(gradients, gradients)
    foreach.add_(fresh, foreach.mul(squares, fresh_weight))
    foreach.copy_(before, momenta)
    denominators = _denominators(frozen, eps)
    ratios = foreach.div(denominators, _denominators(fresh, eps))
    largest = torch.stack(foreach.max(ratios))
    foreach.div_(momenta, denominators)
    if not decay:
        return torch.stack([largest, *torch.zeros_like(largest).expand(2, -1)])
    plain = _norms(momenta)
    foreach.add_(momenta, foreach.mul(parameters, decay))
    return torch.stack([largest, plain, _norms(momenta)])


def scaled_step_(parameters: list[Tensor], directions: list[Tensor], ratios: Tensor, rate: float) -> None:
    """Step by rate times ratio along each direction; the directions are overwritten."""
    foreach.mul_(directions, list(ratios.unbind()))
    foreach.mul_(directions, rate)
    foreach.sub_(parameters, directions)


def frozen_adam_step_(
    parameters: list[Tensor],
    before: list[Tensor],
    momenta: list[Tensor],
    frozen: list[Tensor],
    numbers: Sequence[float],
) -> None:
    """Step along Adam's direction; `numbers` are those of `thinwire.core.kernels.adaptive.frozen_adam_step_`."""
    eps, decay, rate = numbers
    directions = foreach.div(momenta, _denominators(frozen, eps))
    if decay:
        foreach.add_(directions, foreach.mul(parameters, decay))
    foreach.copy_(before, momenta)
    foreach.mul_(directions, rate)
    foreach.sub_(parameters, directions)


def _denominators(variances: list[Tensor], eps: float) -> list[Tensor]:
    on_cpu = variances[0].device.type == "cpu"
    roots = list(map(_sqrt, variances)) if on_cpu else foreach.sqrt(variances)
    return list(foreach.add(roots, eps))


def _sqrt(x: Tensor) -> Tensor:
    return exact_sqrt(x) if x.dtype == torch.float32 else x.sqrt()


def _norms(tensors: list[Tensor]) -> Tensor:
    if tensors[0].device.type != "cpu":
        return torch.stack(foreach.norm(tensors))
    return torch.stack([_sqrt(tree_sums(x.square().reshape(1, -1))[0]) for x in tensors])
