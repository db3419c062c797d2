"""Numbers in a few bits each, rounded at random so that their means are right.

A payload is all scales, then one plane of bits after the other, the lowest first; a plane is ceil(n/8) bytes, and bit j
of its byte k belongs to element 8k + j.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.kernels.base import (
    check_layout,
    check_norm,
    check_payload,
    check_same_device,
    compiled,
    on_gpu,
    single,
    writable,
)
from thinwire.kernels.reference import quantized
from thinwire.kernels.rng import mix64


class _Coding(ctypes.Structure):
    """`coding` of quantized.c: how numbers are coded."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "block")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("bits", "scale_bytes", "squared", "dither")),
        ("shift", ctypes.c_float),
    ]


def quantized_nbytes(n: int, bits: int, block: int, scale_bytes: int = 4) -> int:
    """Bytes of the payload of `n` elements."""
    return -(-n // block) * scale_bytes + bits * -(-n // 8)


def quantize_(
    x: Tensor,
    out: Tensor,
    *,
    bits: int,
    block: int,
    key: int,
    shift: float = 0.0,
    norm: Literal["max", "l2"] = "max",
    scale_bytes: int = 4,
) -> None:
    r"""Write codes of `x` into `out`.

    With $N$ a block's scale and $s = 2^{b-1}-1$, an element's code is $\lfloor x s/N + s + u \rfloor$ in $[0, 2s]$; of
    one bit, $\lfloor (x/N + 1)/2 + u \rfloor$. Here $u$ is `uniform(n, key)` plus the shift, modulo 1.

    Args:
        x: fp32, [n]; other floats are converted.
        out: uint8, `quantized_nbytes(n, bits, block, scale_bytes)`.
        bits: of a code, 1 to 8.
        block: elements that share a scale.
        key: of the draws.
        shift: added to the draws, modulo 1; in [0, 1).
        norm: the scale is the largest absolute value, or the Euclidean norm.
        scale_bytes: 4 for fp32, 2 for bf16, rounded up.

    Raises:
        ConfigError: sizes do not fit, or an argument is out of range.
    """
    _check(bits, block, shift, scale_bytes)
    check_norm(norm, ("max", "l2"))
    check_payload(out, quantized_nbytes(x.numel(), bits, block, scale_bytes))
    check_same_device(x, out)
    if x.numel() == 0:
        return
    with writable(out, torch.uint8) as target:
        _quantize(single(x), target, bits, block, key, shift, norm, scale_bytes)


def _quantize(
    x: Tensor, out: Tensor, bits: int, block: int, key: int, shift: float, norm: str, scale_bytes: int
) -> None:
    library = compiled(x)
    if library is not None:
        coding = _Coding(x.numel(), block, mix64(key), bits, scale_bytes, squared=norm == "l2", shift=shift)
        library.thinwire_quantize(x.data_ptr(), out.data_ptr(), ctypes.byref(coding))
    elif on_gpu(x):
        from thinwire.kernels import triton_quantized

        triton_quantized.quantize_(
            x, out, bits=bits, block=block, key=key, shift=shift, norm=norm, scale_bytes=scale_bytes
        )
    else:
        quantized.quantize_(x, out, bits=bits, block=block, key=key, shift=shift, norm=norm, scale_bytes=scale_bytes)


def dequantize_(
    payload: Tensor,
    out: Tensor,
    *,
    bits: int,
    block: int,
    key: int,
    dither: bool = False,
    shift: float = 0.0,
    scale_bytes: int = 4,
) -> None:
    r"""Write into `out`, fp32 [n], what codes stand for.

    A code $q$ stands for $(q - s) N/s$. With `dither` the draws that rounded it are made again and subtracted,
    $(q - u + 1/2 - s) N/s$: the error is then uniform within half a level, whatever $x$ was (Roberts, Picture Coding
    Using Pseudo-Random Noise, IRE Transactions, 1962).

    Raises:
        ConfigError: sizes do not fit, or an argument is out of range.
    """
    _check(bits, block, shift, scale_bytes)
    check_payload(payload, quantized_nbytes(out.numel(), bits, block, scale_bytes))
    check_same_device(out, payload)
    if out.numel() == 0:
        return
    with writable(out) as target:
        _dequantize(payload.contiguous(), target, bits, block, key, dither, shift, scale_bytes)


def _dequantize(
    payload: Tensor, out: Tensor, bits: int, block: int, key: int, dither: bool, shift: float, scale_bytes: int
) -> None:
    library = compiled(out)
    if library is not None:
        coding = _Coding(out.numel(), block, mix64(key), bits, scale_bytes, dither=dither, shift=shift)
        library.thinwire_dequantize(payload.data_ptr(), out.data_ptr(), ctypes.byref(coding))
    elif on_gpu(out):
        from thinwire.kernels import triton_quantized

        triton_quantized.dequantize_(
            payload, out, bits=bits, block=block, key=key, dither=dither, shift=shift, scale_bytes=scale_bytes
        )
    else:
        quantized.dequantize_(
            payload, out, bits=bits, block=block, key=key, dither=dither, shift=shift, scale_bytes=scale_bytes
        )


def _check(bits: int, block: int, shift: float, scale_bytes: int) -> None:
    check_layout(block, scale_bytes)
    if not 1 <= bits <= 8:
        raise ConfigError(f"bits={bits}: must lie in 1..8")
    if not 0 <= shift < 1:
        raise ConfigError(f"shift={shift}: must lie in [0, 1), the part of a circle")
