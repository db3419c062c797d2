# SPDX-License-Identifier: Apache-2.0
"""Which optimizers divide each element of a gradient by its size, and which codes they cannot be given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.core.replica.moments import fresh_optimizer, parts_of
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec

# RAdam's first five steps do not look at sizes.
_STEPS, _SMALL, _LR = 8, 1e-3, 1e-3


def divides_by_size(optimizer: Optimizer) -> bool:
    """Whether an optimizer divides each element of a gradient by its size so far, as Adam, Adagrad and RMSprop do.

    Found by a few steps of a new one of its class, on two elements of which one has a thousandth of the other's
    gradient: where sizes are divided away, both move about equally far. An optimizer whose `eps` exceeds the gradients
    is no such one, whatever its name. False where the steps fail, as of optimizers that need a closure.

    Example:
        >>> import torch
        >>> from thinwire.methods.optimizers.adaptive import divides_by_size
        >>> weights = [torch.nn.Parameter(torch.zeros(2))]
        >>> divides_by_size(torch.optim.AdamW(weights)), divides_by_size(torch.optim.SGD(weights, momentum=0.9))
        (True, False)
    """
    return any(_moves_alike(each, group) for each in parts_of(optimizer) for group in each.param_groups)


def _moves_alike(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    x = nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu"))
    # On the CPU and in fp32, whatever the group's own parameters need.
    usable = {"lr": _LR, "fused": None, "foreach": None, "capturable": False, "differentiable": False}
    chosen = {name: value for name, value in usable.items() if name in group}
    try:
        with torch.device("cpu"):  # where torch makes counters, unless the default device is another
            tried = fresh_optimizer(optimizer, [{**group, **chosen, "params": [x]}])
            before = x.detach().clone()
            for _ in range(_STEPS):
                before.copy_(x.detach())
                x.grad = torch.tensor([1.0, _SMALL], dtype=torch.float32, device="cpu")
                tried.step()
    except Exception:  # what another package's optimizer needs is not known
        return False
    large, small = (x.detach() - before).abs().tolist()
    return small > 10 * _SMALL * large


def check_signs(strategy: object, codec: Codec | None, optimizer: Optimizer) -> None:
    """Refuse to send signs of gradients to an optimizer that divides each element by its size.

    With one absolute value for a whole block, no element's own size reaches the optimizer, and error feedback does not
    bring it back: the square of a sum of codes is not the sum of squares (Tang et al., 1-bit Adam, ICML 2021,
    arXiv:2102.02888).

    Args:
        strategy: whose gradients are coded, for the error.
        codec: of the gradients; None sends them as they are.
        optimizer: the worker's.

    Raises:
        ConfigError: with what to use instead.
    """
    if codec is None or not codec.sign_only or not divides_by_size(optimizer):
        return
    name = type(optimizer).__name__
    raise ConfigError(
        f"{name} under {strategy}: {name} divides each element of the gradient by its size, and the codec sends signs "
        "without these sizes, so it would hardly learn; use OneBitAdam or OneBitLamb under CompressedMomentum(), which "
        "sends signs of the momentum, or a codec with sizes, such as Quantize(4), or SGD"
    )
