# SPDX-License-Identifier: Apache-2.0
"""Find the elements of largest absolute value, and pack indices into bits."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.base import as_fp32, check_payload, compiled
from thinwire.core.kernels.reference import largest
from thinwire.errors import ConfigError, NonFiniteError

# Candidates to collect, in addition to 2 k, before the smaller ones are dropped.
_SPARE = 65536
# As in largest.c.
_BINS = 65536
_LANES = 16


def top_k(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest absolute values (of all, if there are fewer), int64, ascending.

    The first of equal values are chosen.

    Raises:
        NonFiniteError: the vector contains NaN, which cannot be ordered; on a GPU, where the host does not wait to
            learn it, the indices are then any below n.
    """
    x = as_fp32(x)
    k, library = min(k, x.numel()), compiled(x)
    if x.is_meta:
        return torch.empty(max(k, 0), dtype=torch.int64, device=x.device)
    if k < 1 or library is None:
        if not x.is_cuda:
            refuse_nan(x)
        return largest.top_k(x, k) if k > 0 else torch.empty(0, dtype=torch.int64, device=x.device)
    sizes, indices, counts = candidate_buffers(x.numel(), k)
    buffers = [each.data_ptr() for each in (sizes, indices, counts)]
    found = library.thinwire_top_k(x.data_ptr(), x.numel(), k, *buffers, sizes.numel())
    if found < 0:
        refuse_nan(x)
    return indices[:found].clone()


def refuse_nan(x: Tensor) -> None:
    """Check that a vector contains no NaN.

    Raises:
        NonFiniteError: it contains NaN.
    """
    wrong = int(x.isnan().sum())
    if wrong:
        raise NonFiniteError(f"{wrong} of {x.numel()} elements are NaN: their order is undefined")


def candidate_buffers(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the candidates' absolute values (as bits) and indices, and the histogram that selects them."""
    # With twice the space of the kept candidates, few elements are copied when the smaller ones are dropped.
    capacity = min(n, 2 * k + _SPARE) + 2 * _LANES
    sizes = torch.empty(capacity, dtype=torch.int32, device="cpu")
    counts = torch.empty(_BINS, dtype=torch.int32, device="cpu")
    return sizes, torch.empty(capacity, dtype=torch.int64, device="cpu"), counts


def _index_bits(n: int) -> int:
    """Return the bits of an index below `n`: the base-2 logarithm of n, rounded up."""
    return max(n - 1, 0).bit_length()


def packed_nbytes(k: int, n: int) -> int:
    """Return the bytes of k packed indices below `n`."""
    return -(-k * _index_bits(n) // 8)


def pack_indices(indices: Tensor, n: int) -> Tensor:
    """Pack indices below `n`, int64 [k], into as few bits each as can hold them; uint8 [packed_nbytes(k, n)].

    Bit j of byte i is bit 8i + j of the indices laid end to end, each with its lowest bit first.
    """
    width, library = _index_bits(n), compiled(indices)
    if indices.is_meta:
        return torch.empty(packed_nbytes(indices.numel(), n), dtype=torch.uint8, device=indices.device)
    if library is None:
        return largest.pack_indices(indices, width)
    indices = indices.to(torch.int64).contiguous()
    out = torch.empty(packed_nbytes(indices.numel(), n), dtype=torch.uint8, device="cpu")
    library.thinwire_pack_indices(indices.data_ptr(), indices.numel(), width, out.data_ptr())
    return out


def unpack_indices(packed: Tensor, n: int, k: int) -> Tensor:
    """Reverse `pack_indices`; int64 [k].

    Raises:
        ConfigError: the number of bytes is wrong, or an index is not below n; on a GPU, where the host does not wait to
            learn it, such an index becomes n - 1.
    """
    check_payload(packed, packed_nbytes(k, n))
    width, library = _index_bits(n), compiled(packed)
    if packed.is_meta:
        return torch.empty(k, dtype=torch.int64, device=packed.device)
    if library is None:
        out = largest.unpack_indices(packed, width, k)
    else:
        packed, out = packed.contiguous(), torch.empty(k, dtype=torch.int64, device="cpu")
        library.thinwire_unpack_indices(packed.data_ptr(), k, width, out.data_ptr())
    if packed.is_cuda:
        return out.clamp_(max=n - 1)
    if k and int(out.max()) >= n:
        raise ConfigError(
            f"index {int(out.max())}: must be below {n}. The payload is damaged or belongs to another vector"
        )
    return out
