"""Steps of adaptive optimizers: many tensors, each read as seldom as can be.

C does it where every tensor is fp32, on the CPU and contiguous; torch everywhere else.
"""

from __future__ import annotations

from ctypes import CDLL, c_float

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.kernels.base import check_length, compiled
from thinwire.kernels.reference import adaptive as reference
from thinwire.kernels.reference.bits import rooted

_PLAIN = (Tensor, nn.Parameter)


def turn_(
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
    r"""Turn momenta into 1-bit LAMB's directions, and tell how far each tensor may go.

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
        ConfigError: there are not as many of each kind, or their shapes differ.
    """
    _check(momenta, before, frozen, fresh, parameters)
    beta1, beta2 = betas
    numbers = (beta1, beta2, (1 - beta2) / (1 - beta1) ** 2, eps, decay)
    library = _library(momenta, before, frozen, fresh, parameters)
    if library is None:
        grown, plain, whole = reference.turn_(momenta, before, frozen, fresh, parameters, numbers)
        return grown, plain, whole
    found, habits = momenta[0].new_empty(len(momenta), 3), (c_float * 5)(*numbers)
    for place, (x, *others) in enumerate(zip(parameters, momenta, before, frozen, fresh, strict=True)):
        pulled = x.data_ptr() if decay else None
        ends = (x.numel(), habits, found.data_ptr() + 12 * place)
        library.thinwire_turn(*(tensor.data_ptr() for tensor in others), pulled, *ends)
    grown, *squares = found.unbind(1)
    plain, whole = (rooted(square) for square in squares)
    return grown, plain, whole


def descend_(parameters: list[Tensor], directions: list[Tensor], ratios: Tensor, *, rate: float) -> None:
    r"""$x \leftarrow x - \gamma\, (r u)$ for every tensor.

    Args:
        parameters: $x$.
        directions: $u$, like the parameters; used up.
        ratios: $r$, one for each tensor, in the tensors' dtype.
        rate: $\gamma$.

    Raises:
        ConfigError: there are not as many of each kind, or their shapes differ.
    """
    _check(parameters, directions)
    check_length("ratios", ratios.numel(), len(parameters))
    library = _library(parameters, directions)
    if library is None:
        reference.descend_(parameters, directions, ratios, rate)
        return
    for x, direction, ratio in zip(parameters, directions, ratios.tolist(), strict=True):
        library.thinwire_descend(x.data_ptr(), direction.data_ptr(), x.numel(), ratio, rate)


def adam_descend_(
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
        ConfigError: there are not as many of each kind, or their shapes differ.
    """
    _check(parameters, before, momenta, frozen)
    library = _library(parameters, before, momenta, frozen)
    if library is None:
        reference.adam_descend_(parameters, before, momenta, frozen, (eps, decay, rate))
        return
    for every in zip(parameters, before, momenta, frozen, strict=True):
        library.thinwire_adam_descend(*(x.data_ptr() for x in every), every[0].numel(), eps, decay, rate)


def _library(*lists: list[Tensor]) -> CDLL | None:
    """The compiled kernels, where they can read all of these tensors as runs of numbers."""
    every = [x for each in lists for x in each]
    return compiled(every[0]) if every and all(map(_is_run, every)) else None


def _is_run(x: Tensor) -> bool:
    return type(x) in _PLAIN and x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()


def _check(*lists: list[Tensor]) -> None:
    first = lists[0]
    for others in lists[1:]:
        check_length("a list", len(others), len(first))
        for x, other in zip(first, others, strict=True):
            if x.shape != other.shape:
                raise ConfigError(f"{list(other.shape)} beside {list(x.shape)}: a tensor's state must have its shape")
