# SPDX-License-Identifier: Apache-2.0
"""Parts of the floating-point format as codes: powers of two (sign and exponent), and eight bits with scales.

Torch computes both, on a GPU Triton the powers of two. The functions below define the order of the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.base import as_fp32, blocks_as_rows, on_gpu, sample_of
from thinwire.core.kernels.reading import join
from thinwire.core.kernels.rng import uniform
from thinwire.core.kernels.signs import pack_signs, unpack_signs

_MANTISSA_BITS, _LARGEST = 23, 254


def encode_powers(x: Tensor, *, key: int) -> Tensor:
    """Round each element to an adjacent power of two, without bias: n exponents, then n sign bits."""
    x, n = as_fp32(x), x.numel()
    if x.is_meta:
        return torch.empty(n + -(-n // 8), dtype=torch.uint8, device=x.device)
    if n and on_gpu(x, _sample):
        from thinwire.core.kernels import triton_floats

        return triton_floats.encode_powers(x, key=key)
    # The bits of fp32 without the sign: the mantissa over 2**23 is the probability of rounding up.
    pattern = x.view(torch.int32) & 0x7FFFFFFF
    up = (pattern & 0x7FFFFF).to(torch.float32) * 2.0**-_MANTISSA_BITS > uniform(n, key, device=x.device)
    # Exponent 255 would be infinity, so the largest numbers are rounded down.
    exponents = ((pattern >> _MANTISSA_BITS) + up.to(torch.int32)).clamp(max=_LARGEST)
    return join([exponents.to(torch.uint8), pack_signs(x)])


def decode_powers(payload: Tensor, n: int) -> Tensor:
    """Reverse `encode_powers`; fp32 [n]. Exponent 0 decodes to zero."""
    if payload.is_meta:
        return torch.empty(n, dtype=torch.float32, device=payload.device)
    if n and on_gpu(payload, _sample):
        from thinwire.core.kernels import triton_floats

        return triton_floats.decode_powers(payload.contiguous(), n)
    exponents, signs = payload.split([n, -(-n // 8)])
    return unpack_signs(signs, n).mul_((exponents.to(torch.int32) << _MANTISSA_BITS).view(torch.float32))


def encode_fp8(x: Tensor, kind: torch.dtype, *, block: int) -> Tensor:
    """Scale each block so that its largest element becomes fp8's largest number: fp32 scales, then n bytes."""
    if x.is_meta:
        return torch.empty(x.numel() + 4 * -(-x.numel() // block), dtype=torch.uint8, device=x.device)
    scales, codes = [x.new_empty(0, dtype=torch.uint8)], list[Tensor]()
    largest = torch.finfo(kind).max
    for rows in blocks_as_rows(as_fp32(x), block):
        # Divide by a tensor: on a GPU torch replaces a division by a number with a product, which rounds differently.
        scale = rows.abs().amax(1, keepdim=True) / rows.new_full((), largest)
        scales.append(scale.view(-1).view(torch.uint8))
        # A scale that is zero or subnormal is rounded coarsely, so that quotients may exceed fp8's largest number.
        scaled = torch.where(scale > 0, rows / scale, 0.0).clamp(-largest, largest)
        codes.append(scaled.to(kind).view(torch.uint8).view(-1))
    return join([*scales, *codes])


def decode_fp8(payload: Tensor, n: int, kind: torch.dtype, *, block: int) -> Tensor:
    """Reverse `encode_fp8`; fp32 [n]."""
    if payload.is_meta:
        return torch.empty(n, dtype=torch.float32, device=payload.device)
    scales, codes = payload.split([payload.numel() - n, n])
    x, start = codes.view(kind).to(torch.float32), 0
    for rows in blocks_as_rows(x, block):
        count = rows.shape[0]
        # A slice of a payload need not be aligned to four bytes; a clone is.
        rows.mul_(scales.clone().view(torch.float32)[start : start + count, None])
        start += count
    return x


def _sample(device: torch.device) -> list[Tensor]:
    """See `on_gpu`."""
    x = sample_of(device)
    payload = encode_powers(x, key=1)
    return [payload, decode_powers(payload, x.numel())]
