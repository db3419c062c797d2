# SPDX-License-Identifier: Apache-2.0
"""Push-sum's mass: a numerator and its weight in one vector, which is sent as one message.

The weight is an fp64 number; its 8 bytes follow the numerator's elements. In fp32 the sum of all weights would drift
over thousands of steps.
"""

import torch
from torch import Tensor

from thinwire.core.replica.replica import Replica
from thinwire.methods.reduce.compressed_all_reduce import mix_
from thinwire.methods.topology.base import Peers


def mass_of(x: Tensor) -> Tensor:
    """Make a mass from `x`, in fp32 at least, with the weight one."""
    exact = torch.promote_types(x.dtype, torch.float32)
    one = torch.ones(1, dtype=torch.float64, device=x.device)
    return torch.cat([x.to(exact), one.view(exact)])


def numerator(mass: Tensor) -> Tensor:
    """Return the vector without the weight, as a view."""
    return mass[: -_tail(mass)]


def weight(mass: Tensor) -> Tensor:
    """Return a copy of the weight, an fp64 scalar."""
    # A copy, because a view as fp64 must start at a multiple of 8 bytes, and the numerator may end elsewhere.
    return mass[-_tail(mass) :].clone().view(torch.float64)[0]


def quotient(mass: Tensor) -> Tensor:
    """Return the numerator divided by the weight, in the numerator's dtype."""
    return numerator(mass) / weight(mass)


def debias_(r: Replica, mass: Tensor) -> None:
    """Set the model's parameters to the quotient, and save a copy for the next step."""
    r.x.copy_(quotient(mass))
    r.state["debiased"].copy_(r.x)


def mix_mass_(mass: Tensor, received: list[Tensor], peers: Peers) -> Tensor:
    """Replace a mass with the weighted sum of itself and the received ones, both numerators and weights."""
    total = peers.own * weight(mass)
    for share, message in zip(peers.weights, received, strict=True):
        total += share * weight(message)
    mix_(numerator(mass), [numerator(message) for message in received], peers)
    mass[-_tail(mass) :].copy_(total[None].view(mass.dtype))
    return mass


def inherit_mass_(mass: Tensor, inherited: list[Tensor], scale: float) -> Tensor:
    """Add the masses of leaving workers, and multiply numerator and weight by a number."""
    total = (weight(mass) + sum(weight(each) for each in inherited)) * scale
    x = numerator(mass)
    for each in inherited:
        x.add_(numerator(each))
    # In fp64, since the factor rounded to fp32 would differ from the weight's.
    x.copy_(x.double().mul_(scale))
    mass[-_tail(mass) :].copy_(total[None].view(mass.dtype))
    return mass


def _tail(mass: Tensor) -> int:
    """Return the number of elements with the weight's 8 bytes."""
    return 8 // mass.element_size()
