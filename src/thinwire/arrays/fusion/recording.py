# SPDX-License-Identifier: Apache-2.0
"""What `FusedArray.capture` needs to know from the other modules while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

RECORDER = ContextVar[Callable[[Any], None] | None]("recorder", default=None)
"""Called with each optimizer and scaler before a step changes it; None outside `FusedArray.capture`."""


def is_capturing() -> bool:
    """Return True if the current CUDA stream records a graph instead of running."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def constants(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return numbers as a tensor of the dtype and device of `like`, made once: making it again waits for a GPU."""
    if like.device.type == "cpu":
        return _made(values, like.dtype, like.device)
    # A tensor that was made in inference mode cannot be saved for a backward pass.
    return _kept(values, like.dtype, like.device, torch.is_inference_mode_enabled())


def _made(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(device, dtype)


@lru_cache(maxsize=256)
def _kept(values: tuple[float, ...], dtype: torch.dtype, device: torch.device, inference: bool) -> Tensor:
    return _made(values, dtype, device)
