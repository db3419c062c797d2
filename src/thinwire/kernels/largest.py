"""The elements of largest absolute value, and their places as bits."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import ConfigError, NonFiniteError
from thinwire.kernels.base import check_payload, compiled, single
from thinwire.kernels.reference import largest

# What lies in a net before its mesh is widened, beside twice what is asked for.
_ROOM = 65536
_BINS = 65536
_LANES = 16


def top_k(x: Tensor, k: int) -> Tensor:
    """Places of the k largest absolute values (of all, where there are fewer), int64, rising; the first among equals.

    Raises:
        NonFiniteError: there is a NaN, which is neither larger nor smaller than others.
    """
    x = single(x)
    k, library = min(k, x.numel()), compiled(x)
    if k < 1 or library is None:
        check_numbers(x)
        return largest.top_k(x, k) if k > 0 else torch.empty(0, dtype=torch.int64, device=x.device)
    sizes, places, counts = net_of(x.numel(), k)
    caught = [each.data_ptr() for each in (sizes, places, counts)]
    found = library.thinwire_top_k(x.data_ptr(), x.numel(), k, *caught, sizes.numel())
    if found < 0:
        check_numbers(x)
    return places[:found].clone()


def check_numbers(x: Tensor) -> None:
    """Refuse what has no order.

    Raises:
        NonFiniteError: there is a NaN.
    """
    wrong = int(x.isnan().sum())
    if wrong:
        raise NonFiniteError(f"{wrong} of {x.numel()} elements are NaN: none of them is the largest")


def net_of(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for candidates' sizes and places, and for the counts by which they are thinned out."""
    capacity = min(n, 2 * k + _ROOM) + 2 * _LANES
    sizes, counts = torch.empty(capacity, dtype=torch.int32), torch.empty(_BINS, dtype=torch.int32)
    return sizes, torch.empty(capacity, dtype=torch.int64), counts


def width_of(n: int) -> int:
    """Bits that a place among `n` takes: the logarithm of n to base 2, rounded up."""
    return max(n - 1, 0).bit_length()


def packed_nbytes(k: int, n: int) -> int:
    """Bytes that k places among `n` take."""
    return -(-k * width_of(n) // 8)


def pack_indices(indices: Tensor, n: int) -> Tensor:
    """Places among `n`, int64 [k], in as few bits each as hold them; uint8 [packed_nbytes(k, n)].

    Bit j of byte i is bit 8i + j of the numbers laid end to end, each with its lowest bit first.
    """
    width, library = width_of(n), compiled(indices)
    if library is None:
        return largest.pack_indices(indices, width)
    indices = indices.to(torch.int64).contiguous()
    out = torch.empty(packed_nbytes(indices.numel(), n), dtype=torch.uint8)
    library.thinwire_pack_indices(indices.data_ptr(), indices.numel(), width, out.data_ptr())
    return out


def unpack_indices(packed: Tensor, n: int, k: int) -> Tensor:
    """The k places, int64 [k].

    Raises:
        ConfigError: the bytes are not those of k places among n, or one of them is beyond n.
    """
    check_payload(packed, packed_nbytes(k, n))
    width, library = width_of(n), compiled(packed)
    if library is None:
        out = largest.unpack_indices(packed, width, k)
    else:
        packed, out = packed.contiguous(), torch.empty(k, dtype=torch.int64)
        library.thinwire_unpack_indices(packed.data_ptr(), k, width, out.data_ptr())
    if not out.is_meta and k and int(out.max()) >= n:
        raise ConfigError(f"place {int(out.max())}: must be below {n}; the payload is damaged or another vector's")
    return out
