"""The largest elements, and places as bits, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.reference.bits import pack_bits, unpack_bits


def top_k(x: Tensor, k: int) -> Tensor:
    """Places of the k largest absolute values of [n], k at most n and no NaN among them; the first among equals."""
    sizes = x.abs()
    least = torch.topk(sizes, k, sorted=False).values.min()
    above = (sizes > least).nonzero().flatten()
    equal = (sizes == least).nonzero().flatten()[: k - len(above)]
    return torch.cat([above, equal]).sort().values


def pack_indices(indices: Tensor, width: int) -> Tensor:
    """Numbers of `width` bits each, int64 [k], end to end."""
    places = torch.arange(width, device=indices.device)
    return pack_bits(((indices[:, None] >> places) & 1).reshape(-1).to(torch.uint8))


def unpack_indices(packed: Tensor, width: int, k: int) -> Tensor:
    """The k numbers."""
    flags = unpack_bits(packed, k * width).view(k, width).to(torch.int64)
    return (flags << torch.arange(width, device=packed.device)).sum(1)
