"""Steps of adaptive optimizers, by torch: lists of tensors of any shapes.

On a CPU norms are summed in the order of the compiled kernels; elsewhere as torch sees fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.reference.bits import rooted, tree_sums


def turn_(
    momenta: list[Tensor],
    before: list[Tensor],
    frozen: list[Tensor],
    fresh: list[Tensor],
    parameters: list[Tensor],
    numbers: Sequence[float],
) -> Tensor:
    """Directions in the place of momenta; of each tensor the largest ratio, and two norms where there is decay, [3, k].

    `numbers` are those of `thinwire.kernels.adaptive.turn_`.
    """
    keep, remember, take, eps, decay = numbers
    ways = torch._foreach_sub(momenta, torch._foreach_mul(before, keep))  # pyright: ignore
    torch._foreach_mul_(fresh, remember)  # pyright: ignore
    torch._foreach_add_(fresh, torch._foreach_mul(torch._foreach_mul(ways, ways), take))  # pyright: ignore
    torch._foreach_copy_(before, momenta)  # pyright: ignore
    spreads = _denominators_of(frozen, eps)
    grown = torch.stack(torch._foreach_max(torch._foreach_div(spreads, _denominators_of(fresh, eps))))  # pyright: ignore
    torch._foreach_div_(momenta, spreads)  # pyright: ignore
    if not decay:
        return torch.stack([grown, *torch.zeros_like(grown).expand(2, -1)])
    plain = _norms_of(momenta)
    torch._foreach_add_(momenta, torch._foreach_mul(parameters, decay))  # pyright: ignore
    return torch.stack([grown, plain, _norms_of(momenta)])


def descend_(parameters: list[Tensor], directions: list[Tensor], ratios: Tensor, rate: float) -> None:
    """So far along each direction; the directions are used up."""
    torch._foreach_mul_(directions, list(ratios.unbind()))  # pyright: ignore
    torch._foreach_mul_(directions, rate)  # pyright: ignore
    torch._foreach_sub_(parameters, directions)  # pyright: ignore


def adam_descend_(
    parameters: list[Tensor],
    before: list[Tensor],
    momenta: list[Tensor],
    frozen: list[Tensor],
    numbers: Sequence[float],
) -> None:
    """Along Adam's direction; `numbers` are those of `thinwire.kernels.adaptive.adam_descend_`."""
    eps, decay, rate = numbers
    directions = torch._foreach_div(momenta, _denominators_of(frozen, eps))  # pyright: ignore
    if decay:
        torch._foreach_add_(directions, torch._foreach_mul(parameters, decay))  # pyright: ignore
    torch._foreach_copy_(before, momenta)  # pyright: ignore
    torch._foreach_mul_(directions, rate)  # pyright: ignore
    torch._foreach_sub_(parameters, directions)  # pyright: ignore


def _denominators_of(variances: list[Tensor], eps: float) -> list[Tensor]:
    roots = list(map(_root_of, variances)) if _on_cpu(variances) else torch._foreach_sqrt(variances)  # pyright: ignore
    return list(torch._foreach_add(roots, eps))  # pyright: ignore


def _root_of(variance: Tensor) -> Tensor:
    return rooted(variance) if variance.dtype == torch.float32 else variance.sqrt()


def _norms_of(tensors: list[Tensor]) -> Tensor:
    if not _on_cpu(tensors):
        return torch.stack(torch._foreach_norm(tensors))  # pyright: ignore
    return torch.stack([_root_of(tree_sums(x.square().reshape(1, -1))[0]) for x in tensors])


def _on_cpu(tensors: list[Tensor]) -> bool:
    return tensors[0].device.type == "cpu"
