"""Whether the compiled kernels take what an operation is given."""

from __future__ import annotations

import torch

from laconic.fusion.batch import Batch, Value
from laconic.kernels.base import compiled


def has_kernel(*values: Value | None) -> bool:
    """Whether all are there, of single precision, on the CPU and not empty, outside of autocast."""
    tensors = [value.tensor if isinstance(value, Batch) else value for value in values]
    if any(tensor is None or tensor.dtype != torch.float32 or not tensor.numel() for tensor in tensors):
        return False
    first = tensors[0]
    return first is not None and not torch.is_autocast_enabled(first.device.type) and compiled(first) is not None
