# SPDX-License-Identifier: Apache-2.0
"""Push-sum's mass: a numerator and its weight in one vector, so that one message always carries both.

The weight is an fp64 number; its 8 bytes lie behind the numerator's elements. In single precision the sum of all
weights would drift over thousands of steps; in fp64 it is constant up to the last few bits.
"""

import torch
from torch import Tensor

from thinwire.core.replica.replica import Replica
from thinwire.methods.reduce.compressed_all_reduce import mix_
from thinwire.methods.topology.base import Peers


def mass_of(x: Tensor) -> Tensor:
    """A new vector of `x`, in fp32 at least, with the weight one; 8 bytes longer than `x`."""
    exact = torch.promote_types(x.dtype, torch.float32)
    one = torch.ones(1, dtype=torch.float64, device=x.device)
    return torch.cat([x.to(exact), one.view(exact)])


def numerator(mass: Tensor) -> Tensor:
    """The vector without the weight, as a view."""
    return mass[: -_tail(mass)]


def weight(mass: Tensor) -> Tensor:
    """A copy of the weight, an fp64 scalar."""
    # A copy, because a view as fp64 must start at a multiple of 8 bytes, and the numerator may end elsewhere.
    return mass[-_tail(mass) :].clone().view(torch.float64)[0]


def quotient(mass: Tensor) -> Tensor:
    """The numerator over the weight, in the numerator's dtype."""
    return numerator(mass) / weight(mass)


def debias_(r: Replica, mass: Tensor) -> None:
    """Set the model's parameters to the quotient, and save them as the start of the next step."""
    r.x.copy_(quotient(mass))
    r.state["debiased"].copy_(r.x)


def mix_mass_(mass: Tensor, received: list[Tensor], peers: Peers) -> Tensor:
    """Replace a mass by the weighted sum of itself and the received ones, both numerators and weights."""
    total = peers.own * weight(mass)
    for share, message in zip(peers.weights, received, strict=True):
        total += share * weight(message)
    mix_(numerator(mass), [numerator(message) for message in received], peers)
    mass[-_tail(mass) :].copy_(total[None].view(mass.dtype))
    return mass


def inherit_mass_(mass: Tensor, inherited: list[Tensor], scale: float) -> Tensor:
    """Add masses of workers that leave, and multiply numerator and weight by a number."""
    total = (weight(mass) + sum(weight(each) for each in inherited)) * scale
    x = numerator(mass)
    for each in inherited:
        x.add_(numerator(each))
    # In fp64, since the number rounded to fp32 would be another one than the weight's.
    x.copy_(x.double().mul_(scale))
    mass[-_tail(mass) :].copy_(total[None].view(mass.dtype))
    return mass


def _tail(mass: Tensor) -> int:
    """Elements of the vector that hold the weight's 8 bytes."""
    return 8 // mass.element_size()
