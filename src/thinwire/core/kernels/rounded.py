# SPDX-License-Identifier: Apache-2.0
"""Rounding to the nearest of a few levels on either side of zero.

A payload has all scales in fp32, then the bit planes, as in `quantized`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from thinwire.core.kernels.base import as_fp32, check_code, compiled, writable
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
        if library is None:
            rounded.encode_rounded_(x, rest, target, bits=bits, block=block)
        else:
            how = _Rounding(x.numel(), block, bits)
            left = None if rest is None else rest.data_ptr()
            library.thinwire_encode_rounded(x.data_ptr(), left, target.data_ptr(), ctypes.byref(how))


def decode_rounded_(payload: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    """Decode a payload into `out`, fp32 [n].

    Raises:
        ConfigError: sizes do not fit, or an argument is out of range.
    """
    check_code(out, payload, bits=bits, block=block, scale_bytes=_SCALE_BYTES)
    if out.numel() == 0 or out.is_meta:
        return
    payload, library = payload.contiguous(), compiled(out)
    with writable(out) as target:
        if library is None:
            rounded.decode_rounded_(payload, target, bits=bits, block=block)
        else:
            how = _Rounding(out.numel(), block, bits)
            library.thinwire_decode_rounded(payload.data_ptr(), target.data_ptr(), ctypes.byref(how))
