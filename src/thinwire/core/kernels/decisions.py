# SPDX-License-Identifier: Apache-2.0
"""What a program decides by a tensor's data, of which a meta tensor has none.

A dry run takes the decisions that send most; within `assume_least()`, those that send least. The lines that decide are
those of a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_ASSUMES_LEAST = ContextVar("assumes_least", default=False)


@contextmanager
def assume_least() -> Generator[None]:
    """Within it, `decide` takes the decision that sends least where there are no data."""
    token = _ASSUMES_LEAST.set(True)
    try:
        yield
    finally:
        _ASSUMES_LEAST.reset(token)


def decide(x: Tensor, by: Callable[[], T], *, most: T, least: T) -> T:
    """A decision that depends on the data in `x`.

    Args:
        x: the data.
        by: decides; not called for a meta tensor.
        most: the decision that sends most, taken for a meta tensor.
        least: the one that sends least, taken for a meta tensor within `assume_least()`.

    Example:
        >>> x = torch.ones(3)
        >>> decide(x, lambda: bool(x.sum() > 2), most=True, least=False)
        True
        >>> with assume_least():
        ...     decide(x.to("meta"), lambda: True, most=True, least=False)
        False
    """
    if not x.is_meta:
        return by()
    return least if _ASSUMES_LEAST.get() else most


def on_host(x: Tensor) -> Tensor:
    """A tensor on the CPU, whose data can be read; zeros of its shape for a meta tensor."""
    return torch.zeros(x.shape, dtype=x.dtype, device="cpu") if x.is_meta else x.cpu()


def holds(condition: Tensor) -> bool:
    """Whether a condition, a tensor of one element, is true; it is for a meta tensor, in which nothing goes wrong."""
    return condition.is_meta or bool(condition)


def device_for(x: Tensor, device: str | None) -> torch.device:
    """Where to keep a copy of a tensor: on the device of that name, or its own; that of a meta tensor stays there."""
    return x.device if device is None or x.is_meta else torch.device(device)
