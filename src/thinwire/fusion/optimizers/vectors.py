"""Arithmetic of lists of tensors [models, ...] with one coefficient per model.

Where all models have the same coefficient, it is torch's own arithmetic with a number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = list[Tensor]


class Coefficient:
    """One number per model.

    Args:
        vector: float64 [models] on the host.
    """

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector
        first = float(vector[0])
        self.number = first if bool((vector == first).all()) else None

    def like(self, tensors: Sequence[Tensor]) -> Tensors:
        """The vector beside each tensor, so that it multiplies each model's part by its own number."""
        made: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        found: Tensors = []
        for tensor in tensors:
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            if (dtype, tensor.device) not in made:
                made[dtype, tensor.device] = self.vector.to(tensor.device, dtype)
            found.append(made[dtype, tensor.device].view(-1, *[1] * (tensor.dim() - 1)))
        return found


def scale_(tensors: Tensors, by: Coefficient) -> None:
    """Multiply in place."""
    if by.number is not None:
        torch._foreach_mul_(tensors, by.number)  # pyright: ignore
        return
    torch._foreach_mul_(tensors, by.like(tensors))  # pyright: ignore


def divide_(tensors: Tensors, by: Coefficient) -> None:
    """Divide in place."""
    if by.number is not None:
        torch._foreach_div_(tensors, by.number)  # pyright: ignore
        return
    torch._foreach_div_(tensors, by.like(tensors))  # pyright: ignore


def shift_(tensors: Tensors, by: Coefficient) -> None:
    """Add a number in place."""
    if by.number is not None:
        torch._foreach_add_(tensors, by.number)  # pyright: ignore
        return
    torch._foreach_add_(tensors, by.like(tensors))  # pyright: ignore


def add_(tensors: Tensors, others: Tensors, by: Coefficient) -> None:
    """Add others, each multiplied by the coefficient, in place."""
    if by.number is not None:
        torch._foreach_add_(tensors, others, alpha=by.number)  # pyright: ignore
        return
    torch._foreach_add_(tensors, torch._foreach_mul(others, by.like(others)))  # pyright: ignore


def plus(tensors: Tensors, others: Tensors, by: Coefficient) -> Tensors:
    """As `add_`, into new tensors."""
    if by.number is not None:
        return list(torch._foreach_add(tensors, others, alpha=by.number))  # pyright: ignore
    return list(torch._foreach_add(tensors, torch._foreach_mul(others, by.like(others))))  # pyright: ignore


def towards_(tensors: Tensors, others: Tensors, by: Coefficient) -> None:
    """Go a share of the way to the others, in place."""
    if by.number is not None:
        torch._foreach_lerp_(tensors, others, by.number)  # pyright: ignore
        return
    ways = torch._foreach_sub(others, tensors)  # pyright: ignore
    torch._foreach_add_(tensors, torch._foreach_mul(ways, by.like(tensors)))  # pyright: ignore


def add_product_(tensors: Tensors, ones: Tensors, others: Tensors, by: Coefficient) -> None:
    """Add the products of ones and others, times the coefficient, in place."""
    if by.number is not None:
        torch._foreach_addcmul_(tensors, ones, others, by.number)  # pyright: ignore
        return
    products = torch._foreach_mul(torch._foreach_mul(ones, by.like(ones)), others)  # pyright: ignore
    torch._foreach_add_(tensors, products)  # pyright: ignore


def add_quotient_(tensors: Tensors, ones: Tensors, others: Tensors, by: Coefficient) -> None:
    """Add ones divided by others, times the coefficient, in place."""
    if by.number is not None:
        torch._foreach_addcdiv_(tensors, ones, others, by.number)  # pyright: ignore
        return
    quotients = torch._foreach_div(torch._foreach_mul(ones, by.like(ones)), others)  # pyright: ignore
    torch._foreach_add_(tensors, quotients)  # pyright: ignore
