# SPDX-License-Identifier: Apache-2.0
"""The largest elements, and indices packed into bits, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import pack_bits, unpack_bits


def top_k(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest absolute values of [n], the first of equal ones; k <= n.

    With a NaN among them the indices are any below n.
    """
    sizes, n = x.abs(), x.numel()
    least = torch.topk(sizes, k, sorted=False).values.min()
    above, equal = sizes > least, sizes == least
    # Sizes that are known, so that the host need not wait for a GPU; n stands for none.
    first, rest = (torch.nonzero_static(each, size=k, fill_value=n).flatten() for each in (above, equal))
    missing = k - above.sum()
    rest = rest.where(torch.arange(k, device=x.device) < missing, n)
    return torch.cat([first, rest]).sort().values[:k].clamp(max=n - 1)


def pack_indices(indices: Tensor, width: int) -> Tensor:
    """Lay numbers of `width` bits each, int64 [k], end to end."""
    shifts = torch.arange(width, device=indices.device)
    return pack_bits(((indices[:, None] >> shifts) & 1).reshape(-1).to(torch.uint8))


def unpack_indices(packed: Tensor, width: int, k: int) -> Tensor:
    """Reverse `pack_indices`."""
    flags = unpack_bits(packed, k * width).view(k, width).to(torch.int64)
    return (flags << torch.arange(width, device=packed.device)).sum(1)
