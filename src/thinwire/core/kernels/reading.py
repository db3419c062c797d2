# SPDX-License-Identifier: Apache-2.0
"""What Python reads of a tensor's data, of which a meta tensor has none; and two operators of torch's for both."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from thinwire.core.torch_internals import flatten

_SMALL = 16_384


def all_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite; True for a meta tensor."""
    # A sum with such an element is not finite either. Only where the sum overflows are the elements read again.
    if x.is_meta:
        return True
    return isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).item()) or bool(x.isfinite().all())


def all_finite_each(tensors: Sequence[Tensor]) -> bool:
    """Whether no element of any tensor is NaN or infinite; they are on one device, and True for meta tensors."""
    if not tensors or tensors[0].is_meta:
        return True
    read = tensors
    if tensors[0].device.type == "cpu":
        # A call for each of many small tensors takes longer than a copy of all of them.
        small: list[Tensor] = []
        read = []
        for x in tensors:
            (small if x.numel() <= _SMALL else read).append(x)
        if small:
            read.append(flatten(small))
    return isfinite(get_total_norm(read).item()) or all(all_finite(x) for x in tensors)


def norm_if_finite(x: Tensor) -> tuple[bool, float]:
    """Whether all elements are finite, and the sum of their squares; True and 0 for a meta tensor."""
    if x.is_meta or not x.numel():
        return True, 0.0
    square = float(torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float32))) ** 2
    # The norm is one pass over memory; only where it overflows are the elements read again.
    return square < float("inf") or all_finite(x), square


def bytes_of(x: Tensor, *, if_meta: bytes) -> bytes:
    """The elements of a vector of uint8; `if_meta` for a meta tensor."""
    return if_meta if x.is_meta else bytes(x.tolist())


# Torch has these two for meta tensors as well, but they would take longer there than all the rest of a dry run.


def take(x: Tensor, indices: Tensor) -> Tensor:
    """The elements of a vector at these indices."""
    return torch.empty(indices.numel(), dtype=x.dtype, device=x.device) if x.is_meta else x[indices]


def join(parts: Sequence[Tensor]) -> Tensor:
    """Vectors of one dtype end to end, at least one."""
    if parts[0].is_meta:
        return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)
    return torch.cat(list(parts))
