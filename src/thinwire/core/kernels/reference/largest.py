# SPDX-License-Identifier: Apache-2.0
"""The largest elements, and indices packed into bits, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import pack_numbers, unpack_numbers


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
    return pack_numbers(indices[None], width)[0]


def unpack_indices(packed: Tensor, width: int, k: int) -> Tensor:
    """Reverse `pack_indices`."""
    return unpack_numbers(packed[None], width, k)[0]
