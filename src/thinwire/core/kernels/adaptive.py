# SPDX-License-Identifier: Apache-2.0
"""Steps of adaptive optimizers over lists of tensors, in as few passes over memory as possible.

C runs where every tensor is fp32, contiguous and on the CPU; torch everywhere else.
"""

from __future__ import annotations

from ctypes import CDLL, c_float

import torch
from torch import Tensor, nn

from thinwire.core.kernels.base import check_length, compiled
from thinwire.core.kernels.reference import adaptive as reference
from thinwire.core.kernels.reference.bits import exact_sqrt
from thinwire.errors import ConfigError

_PLAIN = (Tensor, nn.Parameter)


def lamb_direction_(
    momenta: list[Tensor],
    before: list[Tensor],
    frozen: list[Tensor],
    fresh: list[Tensor],
    parameters: list[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Turn momenta into 1-bit LAMB's directions, and compute the inputs of each tensor's trust ratio.

    With $m$ the momentum, $m'$ the one before, $v$ the frozen and $\tilde v$ the fresh variance of one tensor $x$,

    $$\tilde v \leftarrow \beta_2 \tilde v + (1-\beta_2) \Big(\frac{m - \beta_1 m'}{1-\beta_1}\Big)^2, \qquad
      r = \max_i \frac{\sqrt{v_i}+\epsilon}{\sqrt{\tilde v_i}+\epsilon},$$

    $$m' \leftarrow m, \qquad u_0 = \frac{m}{\sqrt v + \epsilon}, \qquad m \leftarrow u = u_0 + \lambda x .$$

    Args:
        momenta: $m$; directions $u$ afterwards.
        before: $m'$, like the momenta; $m$ afterwards.
        frozen: $v$, like the momenta.
        fresh: $\tilde v$, like the momenta; changed.
        parameters: $x$, like the momenta.
        betas: $\beta_1$ and $\beta_2$.
        eps: $\epsilon$.
        decay: $\lambda$.

    Returns:
        $r$, $|u_0|$ and $|u|$ of each tensor, three vectors in the tensors' dtype; without decay the norms are 0.

    Raises:
        ConfigError: the lists differ in length, or their tensors in shape.
    """
    _check(momenta, before, frozen, fresh, parameters)
    beta1, beta2 = betas
    numbers = (beta1, beta2, (1 - beta2) / (1 - beta1) ** 2, eps, decay)
    library = _library(momenta, before, frozen, fresh, parameters)
    if library is None:
        ratio, plain, whole = reference.lamb_direction_(momenta, before, frozen, fresh, parameters, numbers)
        return ratio, plain, whole
    # Per tensor: the largest ratio and two sums of squares.
    found, coefficients = momenta[0].new_empty(len(momenta), 3), (c_float * 5)(*numbers)
    row_bytes = 3 * found.element_size()
    for place, (x, *others) in enumerate(zip(parameters, momenta, before, frozen, fresh, strict=True)):
        decayed = x.data_ptr() if decay else None
        rest = (x.numel(), coefficients, found.data_ptr() + row_bytes * place)
        library.thinwire_lamb_direction(*(tensor.data_ptr() for tensor in others), decayed, *rest)
    ratio, *squares = found.unbind(1)
    plain, whole = (exact_sqrt(square) for square in squares)
    return ratio, plain, whole


def scaled_step_(parameters: list[Tensor], directions: list[Tensor], ratios: Tensor, *, rate: float) -> None:
    r"""$x \leftarrow x - \gamma\, (r u)$ for every tensor.

    Args:
        parameters: $x$.
        directions: $u$, like the parameters; overwritten.
        ratios: $r$, one for each tensor, in the tensors' dtype.
        rate: $\gamma$.

    Raises:
        ConfigError: the lists differ in length, or their tensors in shape.
    """
    _check(parameters, directions)
    check_length("ratios", ratios.numel(), len(parameters))
    library = _library(parameters, directions)
    if library is None:
        reference.scaled_step_(parameters, directions, ratios, rate)
        return
    # One call per tensor: the cost of a call is small, and tensors need not be adjacent.
    for x, direction, ratio in zip(parameters, directions, ratios.tolist(), strict=True):
        library.thinwire_scaled_step(x.data_ptr(), direction.data_ptr(), x.numel(), ratio, rate)


def frozen_adam_step_(
    parameters: list[Tensor],
    before: list[Tensor],
    momenta: list[Tensor],
    frozen: list[Tensor],
    *,
    eps: float,
    decay: float,
    rate: float,
) -> None:
    r"""$m' \leftarrow m$ and $x \leftarrow x - \gamma \big(\frac{m}{\sqrt v + \epsilon} + \lambda x\big)$, in one pass.

    Args:
        parameters: $x$.
        before: $m'$, like the parameters.
        momenta: $m$, like the parameters; not changed.
        frozen: $v$, like the parameters.
        eps: $\epsilon$.
        decay: $\lambda$.
        rate: $\gamma$.

    Raises:
        ConfigError: the lists differ in length, or their tensors in shape.
    """
    _check(parameters, before, momenta, frozen)
    library = _library(parameters, before, momenta, frozen)
    if library is None:
        reference.frozen_adam_step_(parameters, before, momenta, frozen, (eps, decay, rate))
        return
    for own in zip(parameters, before, momenta, frozen, strict=True):
        library.thinwire_frozen_adam_step(*(x.data_ptr() for x in own), own[0].numel(), eps, decay, rate)


def _library(*lists: list[Tensor]) -> CDLL | None:
    """Return the compiled kernels if all these tensors are contiguous fp32 in CPU memory."""
    tensors = [x for each in lists for x in each]
    # A subclass of Tensor may keep its numbers elsewhere than at its data pointer.
    fits = all(
        type(x) in _PLAIN and x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors
    )
    return compiled(tensors[0]) if tensors and fits else None


def _check(*lists: list[Tensor]) -> None:
    first = lists[0]
    for others in lists[1:]:
        check_length("a list", len(others), len(first))
        for x, other in zip(first, others, strict=True):
            if x.shape != other.shape:
                raise ConfigError(
                    f"state of shape {list(other.shape)} for a tensor of shape {list(x.shape)}: both must be equal"
                )
