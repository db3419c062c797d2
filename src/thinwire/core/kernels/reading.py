# SPDX-License-Identifier: Apache-2.0
"""Values that Python reads from tensors, with defaults for meta tensors; and two fast operators for both."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from thinwire.core.torch_internals import flatten

_SMALL = 16_384


def all_finite(x: Tensor) -> bool:
    """Return True if no element is NaN or infinite, or `x` is a meta tensor."""
    # A sum with such an element is not finite. The elements are read again only if the sum overflows.
    if x.is_meta:
        return True
    return isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).item()) or bool(x.isfinite().all())


def all_finite_each(tensors: Sequence[Tensor]) -> bool:
    """Return True if no element of any tensor is NaN or infinite; all must be on one device."""
    if not tensors or tensors[0].is_meta:
        return True
    read = tensors
    if tensors[0].device.type == "cpu":
        # One call per small tensor takes longer than a copy of all of them.
        small: list[Tensor] = []
        read = []
        for x in tensors:
            (small if x.numel() <= _SMALL else read).append(x)
        if small:
            read.append(flatten(small))
    # torch's function for several groups takes longer than the norm of one.
    norm = torch.linalg.vector_norm(read[0]) if len(read) == 1 else get_total_norm(read)
    return isfinite(norm.item()) or all(all_finite(x) for x in tensors)


def norm_if_finite(x: Tensor) -> tuple[bool, float]:
    """Return whether all elements are finite, and the sum of their squares; True and 0 for a meta tensor."""
    if x.is_meta or not x.numel():
        return True, 0.0
    square = float(torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float32))) ** 2
    # The norm is one pass over memory; the elements are read again only if it overflows.
    return square < float("inf") or all_finite(x), square


def bytes_of(x: Tensor, *, if_meta: bytes) -> bytes:
    """Return the bytes of a uint8 vector; `if_meta` for a meta tensor."""
    return if_meta if x.is_meta else bytes(x.tolist())


# Torch's own versions support meta tensors too, but would take longer than the rest of a dry run.


def take(x: Tensor, indices: Tensor) -> Tensor:
    """Return the elements of a vector at these indices."""
    return torch.empty(indices.numel(), dtype=x.dtype, device=x.device) if x.is_meta else x[indices]


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate one or more vectors of one dtype."""
    if parts[0].is_meta:
        return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)
    return torch.cat(list(parts))
