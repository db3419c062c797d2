"""The elements of largest absolute value, and their places as bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import NonFiniteError
from laconic.kernels.bits import pack_bits, unpack_bits


def top_k(x: Tensor, k: int) -> Tensor:
    """Places of the k largest absolute values (of all, where there are fewer), int64, rising; the first among equals.

    Raises:
        NonFiniteError: there is a NaN, which is neither larger nor smaller than others.
    """
    sizes = x.abs()
    if bool(sizes.isnan().any()):
        raise NonFiniteError(f"{int(sizes.isnan().sum())} of {x.numel()} elements are NaN: none of them is the largest")
    k = min(k, x.numel())
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    least = torch.topk(sizes, k, sorted=False).values.min()
    above = (sizes > least).nonzero().flatten()
    equal = (sizes == least).nonzero().flatten()[: k - len(above)]
    return torch.cat([above, equal]).sort().values


def width_of(n: int) -> int:
    """Bits that a place among `n` takes."""
    return max(n - 1, 0).bit_length()


def packed_nbytes(k: int, n: int) -> int:
    """Bytes that k places among `n` take."""
    return -(-k * width_of(n) // 8)


def pack_indices(indices: Tensor, n: int) -> Tensor:
    """Places among `n`, int64 [k], in as few bits each as hold them; uint8 [packed_nbytes(k, n)]."""
    places = torch.arange(width_of(n), device=indices.device)
    return pack_bits(((indices[:, None] >> places) & 1).reshape(-1).to(torch.uint8))


def unpack_indices(packed: Tensor, n: int, k: int) -> Tensor:
    """The k places, int64 [k]."""
    width = width_of(n)
    flags = unpack_bits(packed, k * width).view(k, width).to(torch.int64)
    return (flags << torch.arange(width, device=packed.device)).sum(1)
