# SPDX-License-Identifier: Apache-2.0
"""Quantization to a few bits per number, with unbiased stochastic rounding.

A payload has all scales, then the bit planes, the lowest first. A plane has ceil(n/8) bytes, and bit j of
its byte k belongs to element 8k + j.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.kernels.base import (
    as_fp32,
    blocks_as_rows,
    check_code,
    check_norm,
    compiled,
    on_gpu,
    quantized_nbytes,
    sample_of,
    writable,
)
from thinwire.core.kernels.reference import quantized
from thinwire.core.kernels.rng import mix64
from thinwire.errors import ConfigError


class _Coding(ctypes.Structure):
    """`coding` of quantized.c: the parameters of the quantization."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "block")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("bits", "scale_bytes", "squared", "dither")),
        ("shift", ctypes.c_float),
    ]


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
    r"""Quantize `x` into `out`.

    With $N$ a block's scale and $s = 2^{b-1}-1$, an element's code is $\lfloor x s/N + s + u \rfloor$ in $[0, 2s]$; of
    one bit, $\lfloor (x/N + 1)/2 + u \rfloor$. Here $u$ is `uniform(n, key)` plus the shift, modulo 1.

    Args:
        x: fp32, [n]; other floats are converted.
        out: uint8, `quantized_nbytes(n, bits, block, scale_bytes)`.
        bits: bits of a code, 1 to 8.
        block: elements that share a scale.
        key: the key of the random numbers.
        shift: added to the random numbers, modulo 1; in [0, 1).
        norm: the norm of a block that is its scale: the largest absolute value, or the Euclidean norm.
        scale_bytes: 4 for fp32, 2 for bf16, rounded up.

    Raises:
        ConfigError: sizes do not fit, or an argument is out of range.
    """
    _check_shift(shift)
    check_norm(norm, ("max", "l2"))
    check_code(x, out, bits=bits, block=block, scale_bytes=scale_bytes)
    if x.numel() == 0 or x.is_meta:
        return
    x, library = as_fp32(x), compiled(x)
    with writable(out, torch.uint8) as target:
        if library is not None:
            coding = _Coding(x.numel(), block, mix64(key), bits, scale_bytes, squared=norm == "l2", shift=shift)
            library.thinwire_quantize(x.data_ptr(), target.data_ptr(), ctypes.byref(coding))
            return
        # Triton is optional, so its kernels are imported at use.
        quantize_by = quantized.quantize_
        if on_gpu(x, _sample):
            from thinwire.core.kernels.triton_quantized import quantize_ as quantize_by
        quantize_by(x, target, bits=bits, block=block, key=key, shift=shift, norm=norm, scale_bytes=scale_bytes)


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
    r"""Decode a payload into `out`, fp32 [n].

    A code $q$ stands for $(q - s) N/s$. With `dither`, the random numbers of the rounding are recomputed and
    subtracted, $(q - u + 1/2 - s) N/s$: the error is then uniform within half a level, whatever $x$ was (Roberts,
    Picture Coding Using Pseudo-Random Noise, IRE Transactions, 1962).

    Raises:
        ConfigError: sizes do not fit, or an argument is out of range.
    """
    _check_shift(shift)
    check_code(out, payload, bits=bits, block=block, scale_bytes=scale_bytes)
    if out.numel() == 0 or out.is_meta:
        return
    payload, library = payload.contiguous(), compiled(out)
    with writable(out) as target:
        if library is not None:
            coding = _Coding(out.numel(), block, mix64(key), bits, scale_bytes, dither=dither, shift=shift)
            library.thinwire_dequantize(payload.data_ptr(), target.data_ptr(), ctypes.byref(coding))
            return
        dequantize_by = quantized.dequantize_
        if on_gpu(out, _sample):
            from thinwire.core.kernels.triton_quantized import dequantize_ as dequantize_by
        dequantize_by(
            payload, target, bits=bits, block=block, key=key, dither=dither, shift=shift, scale_bytes=scale_bytes
        )


def _check_shift(shift: float) -> None:
    if not 0 <= shift < 1:
        raise ConfigError(f"shift={shift}: must lie in [0, 1), because it is added modulo 1")


def clip_outliers(x: Tensor, *, block: int, deviations: float) -> Tensor:
    """Clip the elements of each block at a number of its standard deviations; fp32 [n]."""
    clipped = torch.empty_like(x, dtype=torch.float32)
    if x.is_meta:
        return clipped
    for rows, out in zip(blocks_as_rows(as_fp32(x), block), blocks_as_rows(clipped, block), strict=True):
        # Subtract the first element before the mean, so that equal elements deviate by exactly zero.
        torch.sub(rows, rows[:, :1], out=out)
        out.sub_(out.mean(1, keepdim=True))
        bound = deviations * (torch.linalg.vector_norm(out, dim=1, keepdim=True) / rows.shape[1] ** 0.5)
        # Equal elements have no outliers; a non-finite block is unchanged.
        bound.masked_fill_((bound > 0).logical_not_(), torch.inf)
        # `clamp_` with two tensors is not vectorized in torch.
        torch.minimum(rows, bound, out=out)
        torch.maximum(out, -bound, out=out)
    return clipped


def _sample(device: torch.device) -> list[Tensor]:
    """See `on_gpu`."""
    x, found = sample_of(device), list[Tensor]()
    for bits in (4, 8):
        payload = torch.empty(quantized_nbytes(x.numel(), bits, 2048), dtype=torch.uint8, device=device)
        decoded = torch.empty_like(x)
        quantize_(x, payload, bits=bits, block=2048, key=1)
        found.append(payload)
        for dither in (False, True):
            dequantize_(payload, decoded, bits=bits, block=2048, key=1, dither=dither)
            found.append(decoded.clone())
    return found
