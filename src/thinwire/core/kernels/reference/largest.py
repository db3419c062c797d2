# SPDX-License-Identifier: Apache-2.0
"""The largest elements, and indices packed into bits, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import pack_bits, unpack_bits


def top_k(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest absolute values of [n], the first of equal ones; k <= n, and no NaN."""
    sizes = x.abs()
    least = torch.topk(sizes, k, sorted=False).values.min()
    above = (sizes > least).nonzero().flatten()
    equal = (sizes == least).nonzero().flatten()[: k - len(above)]
    return torch.cat([above, equal]).sort().values


def pack_indices(indices: Tensor, width: int) -> Tensor:
    """Lay numbers of `width` bits each, int64 [k], end to end."""
    shifts = torch.arange(width, device=indices.device)
    return pack_bits(((indices[:, None] >> shifts) & 1).reshape(-1).to(torch.uint8))


def unpack_indices(packed: Tensor, width: int, k: int) -> Tensor:
    """Reverse `pack_indices`."""
    flags = unpack_bits(packed, k * width).view(k, width).to(torch.int64)
    return (flags << torch.arange(width, device=packed.device)).sum(1)
