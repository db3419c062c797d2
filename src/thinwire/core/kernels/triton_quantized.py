# SPDX-License-Identifier: Apache-2.0
"""Quantization to a few bits per number on a GPU, with the CPU's bits if the scale is the largest value."""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.kernels.base import on_its_device
from thinwire.core.kernels.reference import quantized
from thinwire.core.kernels.reference.bits import blocks_of, read_scales, write_scales
from thinwire.core.kernels.reference.rng import mix64
from thinwire.core.kernels.triton_bits import fits
from thinwire.core.kernels.triton_rng import draw_at, halves, packed

_SPAN = 1024


@triton.jit(do_not_specialize=["low", "high", "shift", "half"])
def _quantize(
    x, scales, planes, n, block, plane, low, high, shift, half,
    SPAN: tl.constexpr, BITS: tl.constexpr, SQUARED: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * block
    count = tl.minimum(n - start, block)
    at = tl.arange(0, SPAN)
    real = at < count
    value = tl.load(x + start + at, mask=real, other=0.0)
    if SQUARED:
        scale = tl.sqrt_rn(tl.sum(value * value, axis=0))
        # After an overflow the sum is computed again from numbers 2**96 times smaller.
        small = value * 1.262177448353619e-29
        again = tl.sqrt_rn(tl.sum(small * small, axis=0)) * 7.922816251426434e28
        scale = tl.where(scale == float("inf"), again, scale)
    else:
        # Absolute values have the order of their bits, with NaN above all: the largest bits keep a NaN.
        scale = tl.max(tl.abs(value).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
    if UP:
        bits = scale.to(tl.int32, bitcast=True)
        scale = tl.where(scale == scale, (bits + 0xFFFF) & -0x10000, bits).to(tl.float32, bitcast=True)
    tl.store(scales + tl.program_id(0), scale)
    ratio = tl.where(scale > 0.0, tl.div_rn(value, tl.where(scale > 0.0, scale, 1.0) + tl.zeros_like(value)), 0.0)
    if BITS == 1:
        place = (ratio + 1.0) * 0.5
    else:
        place = ratio * half + half
    place = tl.maximum(place + draw_at(start + at, low, high, shift), 0.0)
    codes = tl.minimum(place, 2 * half).to(tl.int32).to(tl.uint32)
    bytes_at = tl.arange(0, SPAN // 8)
    for bit in tl.static_range(BITS):
        flags = tl.where(real, (codes >> bit) & 1, 0)
        tl.store(planes + bit * plane + start // 8 + bytes_at, packed(flags, SPAN), mask=bytes_at * 8 < count)


@triton.jit(do_not_specialize=["low", "high", "shift", "half"])
def _dequantize(
    planes, scales, out, n, block, plane, low, high, shift, half,
    SPAN: tl.constexpr, BITS: tl.constexpr, DITHER: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    real = at < n
    codes = tl.zeros((SPAN,), tl.uint32)
    for bit in tl.static_range(BITS):
        byte = tl.load(planes + bit * plane + at // 8, mask=real, other=0).to(tl.uint32)
        codes |= ((byte >> (at % 8).to(tl.uint32)) & 1) << bit
    value = codes.to(tl.int32).to(tl.float32)
    if DITHER:
        value = value - draw_at(at, low, high, shift) + 0.5
    scale = tl.load(scales + at // block, mask=real, other=0.0)
    tl.store(out + at, (value - half) * tl.div_rn(scale, half + tl.zeros_like(scale)), mask=real)


@on_its_device
def quantize_(
    x: Tensor, out: Tensor, *, bits: int, block: int, key: int, shift: float, norm: str, scale_bytes: int
) -> None:
    """Run `thinwire.core.kernels.quantize_`; torch computes blocks that are too large for one program."""
    if not fits(block):
        quantized.quantize_(x, out, bits=bits, block=block, key=key, shift=shift, norm=norm, scale_bytes=scale_bytes)
        return
    n, blocks = x.numel(), blocks_of(x.numel(), block)
    scales, head = torch.empty(blocks, dtype=torch.float32, device=x.device), blocks * scale_bytes
    _quantize[(blocks,)](
        *(x, scales, out[head:], n, block, -(-n // 8), *halves(mix64(key)), shift, quantized.top_of(bits) / 2),
        SPAN=triton.next_power_of_2(block),
        BITS=bits,
        SQUARED=norm == "l2",
        UP=scale_bytes == 2,
        # A product fused with a sum would round once where the CPU rounds twice.
        enable_fp_fusion=False,
    )
    write_scales(scales, out[:head], scale_bytes)


@on_its_device
def dequantize_(
    payload: Tensor, out: Tensor, *, bits: int, block: int, key: int, dither: bool, shift: float, scale_bytes: int
) -> None:
    """Run `thinwire.core.kernels.dequantize_`, with the same bits."""
    n, blocks = out.numel(), blocks_of(out.numel(), block)
    scales, planes = read_scales(payload, blocks, scale_bytes), payload[blocks * scale_bytes :]
    _dequantize[(triton.cdiv(n, _SPAN),)](
        *(planes, scales, out, n, block, -(-n // 8), *halves(mix64(key)), shift, quantized.top_of(bits) / 2),
        SPAN=_SPAN,
        BITS=bits,
        DITHER=dither,
        enable_fp_fusion=False,
    )
