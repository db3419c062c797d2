# SPDX-License-Identifier: Apache-2.0
"""Find optimizers that cannot use sign codecs because they divide gradients by their size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.core.replica.moments import fresh_optimizer, parts_of
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec

# RAdam's first five steps ignore sizes.
_STEPS, _SMALL, _LR = 8, 1e-3, 1e-3


def divides_by_size(optimizer: Optimizer) -> bool:
    """Return True if an optimizer divides gradient elements by their size, like Adam and RMSprop.

    The check takes a few steps of a new optimizer of the class with two elements, where one has 1/1000 of the other's
    gradient: if sizes are divided away, both move about equally far. An optimizer whose `eps` exceeds the gradients
    does not count, whatever its name. The result is False if the steps fail, for example without a closure.

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
    # On the CPU and in fp32, whatever the device and dtype of the group's parameters.
    usable = {"lr": _LR, "fused": None, "foreach": None, "capturable": False, "differentiable": False}
    chosen = {name: value for name, value in usable.items() if name in group}
    try:
        with torch.device("cpu"):  # torch creates counters on the default device
            tried = fresh_optimizer(optimizer, [{**group, **chosen, "params": [x]}])
            before = x.detach().clone()
            for _ in range(_STEPS):
                before.copy_(x.detach())
                x.grad = torch.tensor([1.0, _SMALL], dtype=torch.float32, device="cpu")
                tried.step()
    except Exception:  # the requirements of another package's optimizer are unknown
        return False
    large, small = (x.detach() - before).abs().tolist()
    return small > 10 * _SMALL * large


def check_signs(strategy: object, codec: Codec | None, optimizer: Optimizer) -> None:
    """Check that an optimizer which divides by sizes does not get only signs.

    If a whole block has one absolute value, the sizes of its elements do not reach the optimizer, and error feedback
    does not restore them: the square of a sum of decoded vectors is not the sum of squares (Tang et al., 1-bit Adam,
    ICML 2021, arXiv:2102.02888).

    Args:
        strategy: the strategy, for the error.
        codec: the codec of the gradients; None for no compression.
        optimizer: the worker's optimizer.

    Raises:
        ConfigError: the pair does not work; the error suggests alternatives.
    """
    if codec is None or not codec.traits.sign_only or not divides_by_size(optimizer):
        return
    name = type(optimizer).__name__
    raise ConfigError(
        f"{name} under {strategy}: {name} divides each element of the gradient by its size, and the codec sends signs "
        "without these sizes, so it would hardly learn. Use OneBitAdam or OneBitLamb under CompressedMomentum(), which "
        "sends signs of the momentum, or a codec with sizes, such as Quantize(4), or SGD"
    )
