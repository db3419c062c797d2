# SPDX-License-Identifier: Apache-2.0
"""Rounding to the nearest of a few levels on either side of zero.

A payload has all scales in fp32, then the bit planes, as in `quantized`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.kernels.base import as_fp32, check_code, compiled, on_gpu, quantized_nbytes, sample_of, writable
from thinwire.core.kernels.reference import rounded

_SCALE_BYTES = 4


class _Rounding(ctypes.Structure):
    """`rounding` of rounded.c."""

    _fields_ = [("n", ctypes.c_int64), ("block", ctypes.c_int64), ("bits", ctypes.c_int)]


def encode_rounded_(x: Tensor, residual: Tensor | None, out: Tensor, *, bits: int, block: int) -> None:
    r"""Encode `x + residual` into `out`, and overwrite the residual with the rounding error.

    With $h$ half the distance of levels, an element $t$ gets the level $l = \pm(2m + 1)$ of its sign, with
    $m = \lfloor |t|/2h \rfloor$, at most $2^{b-1} - 1$; its code is $(l + 2^b - 1)/2$. At first $h$ is the best value
    for normal numbers with the block's mean absolute value; from five bits on, the levels reach the block's largest
    element. The sent scale is the least-squares fit to the block with these levels, $\sum t l / \sum l^2$, so that the
    rounding error is never larger than the block.

    Args:
        x: fp32, [n]; other floats are converted.
        residual: like x; None for none.
        out: uint8, `quantized_nbytes(n, bits, block)`.
        bits: bits of a code, 1 to 8.
        block: elements that share a scale.

    Raises:
        ConfigError: sizes do not fit, or an argument is out of range.
    """
    check_code(x, out, residual, bits=bits, block=block, scale_bytes=_SCALE_BYTES)
    if x.numel() == 0 or x.is_meta:
        return
    x, library = as_fp32(x), compiled(x)
    # Without a residual any tensor takes its place: the kernel gets None.
    with writable(out, torch.uint8) as target, writable(x if residual is None else residual, read=True) as kept:
        rest = None if residual is None else kept
        if library is not None:
            how = _Rounding(x.numel(), block, bits)
            left = None if rest is None else rest.data_ptr()
            library.thinwire_encode_rounded(x.data_ptr(), left, target.data_ptr(), ctypes.byref(how))
            return
        # Triton is optional, so its kernels are imported at use.
        encode_by = rounded.encode_rounded_
        if on_gpu(x, _sample):
            from thinwire.core.kernels.triton_rounded import encode_rounded_ as encode_by
        encode_by(x, rest, target, bits=bits, block=block)


def decode_rounded_(payload: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    """Decode a payload into `out`, fp32 [n].

    Raises:
        ConfigError: sizes do not fit, or an argument is out of range.
    """
    _sum([payload], out, bits=bits, block=block, add=False)


def sum_rounded_(payloads: Sequence[Tensor], out: Tensor, *, bits: int, block: int) -> None:
    """Decode payloads, and write their sum, in their order, into `out`, fp32 [n].

    Raises:
        ConfigError: sizes do not fit, or an argument is out of range.
    """
    _sum(payloads, out, bits=bits, block=block, add=True)


def _sum(payloads: Sequence[Tensor], out: Tensor, *, bits: int, block: int, add: bool) -> None:
    for payload in payloads:
        check_code(out, payload, bits=bits, block=block, scale_bytes=_SCALE_BYTES)
    if out.numel() == 0 or out.is_meta:
        return
    library = compiled(out)
    with writable(out) as target:
        if library is not None:
            how = _Rounding(out.numel(), block, bits)
            part = torch.empty_like(target) if add else target
            if add:
                target.zero_()
            for each in payloads:
                payload = each.contiguous()
                library.thinwire_decode_rounded(payload.data_ptr(), part.data_ptr(), ctypes.byref(how))
                if add:
                    target.add_(part)
            return
        sum_by = rounded.sum_rounded_
        if on_gpu(out, _sample):
            from thinwire.core.kernels.triton_rounded import sum_rounded_ as sum_by
        sum_by(torch.stack(list(payloads)), target, bits=bits, block=block, add=add)


def _sample(device: torch.device) -> list[Tensor]:
    """See `on_gpu`."""
    x, found = sample_of(device), list[Tensor]()
    for bits in (4, 7):
        payload = torch.empty(quantized_nbytes(x.numel(), bits, 2048), dtype=torch.uint8, device=device)
        rest, decoded = 0.1 * x, torch.empty_like(x)
        encode_rounded_(x, rest, payload, bits=bits, block=2048)
        sum_rounded_([payload, payload], decoded, bits=bits, block=2048)
        found += [payload, rest, decoded]
    return found
