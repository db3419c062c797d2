# SPDX-License-Identifier: Apache-2.0
"""Decisions that depend on a tensor's data, which a meta tensor does not have.

A dry run takes the decisions that send most; inside `assume_least()`, those that send least. The deciding lines are
those of a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_ASSUMES_LEAST = ContextVar("assumes_least", default=False)


@contextmanager
def assume_least() -> Generator[None]:
    """Make `decide` take the decision that sends least for meta tensors."""
    token = _ASSUMES_LEAST.set(True)
    try:
        yield
    finally:
        _ASSUMES_LEAST.reset(token)


def decide(x: Tensor, by: Callable[[], T], *, most: T, least: T) -> T:
    """Decide by the data in `x`; a meta tensor gets a fixed decision.

    Args:
        x: the data.
        by: makes the decision; not called for a meta tensor.
        most: the decision that sends most, used for a meta tensor.
        least: the decision that sends least, used for a meta tensor inside `assume_least()`.

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
    """Return a tensor on the CPU, for reading; zeros for a meta tensor."""
    return torch.zeros(x.shape, dtype=x.dtype, device="cpu") if x.is_meta else read_host(x)


def host_copy(x: Tensor, *, pinned: bool = False, wait: bool = True) -> Tensor:
    """Copy a tensor into its own host memory; the copy of a meta tensor is a meta tensor.

    Args:
        x: on any device.
        pinned: use page-locked memory for a tensor of a GPU: copies are faster, and may be asynchronous. Torch reuses
            this memory, but never returns it to the system.
        wait: wait until the data have arrived. Otherwise the copy may only be used in the current stream.
    """
    if x.device.type in ("cpu", "meta"):
        return x.clone()
    if not (pinned and x.device.type == "cuda" and torch.cuda.is_available()):
        return x.cpu()
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=not wait)


def host_copy_later(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Copy a tensor of a GPU into pinned host memory, on a stream of its own.

    Returns:
        The copy, and a function that blocks until it has arrived; any thread may call it.
    """
    if x.device.type != "cuda" or not torch.cuda.is_available():
        return host_copy(x), lambda: None
    stream = _copy_stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        copied = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(stream)
    x.record_stream(stream)  # so that its memory is not reused before
    return copied, arrived.synchronize


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def read_host(x: Tensor) -> Tensor:
    """Return a tensor of a GPU on the CPU, for reading: the host waits for it, but not for later work of the GPU."""
    if x.device.type in ("cpu", "meta"):
        return x
    copied = host_copy(x, pinned=True, wait=False)
    if copied.is_pinned():
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(x.device))
        arrived.synchronize()
    return copied


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to a device, without waiting for it; on the CPU, return it unchanged."""
    if device.type == "cuda" and torch.cuda.is_available():
        x = x.pin_memory()  # a copy from other memory would wait for the stream
    return x.to(device, non_blocking=True)


def holds(condition: bool | Tensor) -> bool:
    """Return the value of a condition, a bool or a tensor of one element; True for a meta tensor."""
    return bool(condition) if isinstance(condition, bool) else condition.is_meta or bool(condition)


def device_for(x: Tensor, device: str | None) -> torch.device:
    """Return the device for a copy of a tensor: the given one or its own; always meta for a meta tensor."""
    return x.device if device is None or x.is_meta else torch.device(device)
