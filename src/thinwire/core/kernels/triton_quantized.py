# SPDX-License-Identifier: Apache-2.0
"""Quantization to a few bits per number on a GPU, with the CPU's bits if the scale is the largest value."""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.kernels.base import on_its_device
from thinwire.core.kernels.reference import quantized
from thinwire.core.kernels.reference.bits import blocks_of, read_scales
from thinwire.core.kernels.reference.rng import mix64
from thinwire.core.kernels.triton_bits import (
    SPAN,
    elements_per_scale,
    fits,
    in_groups,
    load_block,
    load_planes,
    load_scale,
    num_warps,
    scales_of,
    scales_to,
    store_block,
    store_planes,
    write_back,
)
from thinwire.core.kernels.triton_rng import draw_at, halves


@triton.jit(do_not_specialize=["low", "high", "shift", "half"])
def _quantize(
    x, scales, planes, n, block, plane, low, high, shift, half,
    SPAN: tl.constexpr, BITS: tl.constexpr, SQUARED: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * block
    count = tl.minimum(n - start, block).to(tl.int32)
    at = tl.arange(0, SPAN)
    value = load_block(x + start, at, count, SPAN)
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
    store_planes(planes + start // 8, plane, codes, count, BITS, SPAN)


@triton.jit(do_not_specialize=["low", "high", "shift", "half"])
def _dequantize(
    planes, scales, out, n, block, plane, low, high, shift, half,
    SPAN: tl.constexpr, BITS: tl.constexpr, PER: tl.constexpr, DITHER: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * SPAN
    count = tl.minimum(n - start, SPAN).to(tl.int32)
    value = load_planes(planes + start // 8, plane, count, BITS, SPAN).to(tl.int32).to(tl.float32)
    if DITHER:
        value = value - draw_at(start + in_groups(SPAN), low, high, shift) + 0.5
    scale = load_scale(scales, start, count, block, PER, SPAN)
    value = (value - half) * tl.div_rn(scale, half + tl.zeros_like(scale))
    store_block(out + start, in_groups(SPAN), value, count, SPAN)


@on_its_device
def quantize_(
    x: Tensor, out: Tensor, *, bits: int, block: int, key: int, shift: float, norm: str, scale_bytes: int
) -> None:
    """Run `thinwire.core.kernels.quantize_`; torch computes blocks that are too large for one program."""
    if not fits(block):
        quantized.quantize_(x, out, bits=bits, block=block, key=key, shift=shift, norm=norm, scale_bytes=scale_bytes)
        return
    n, blocks = x.numel(), blocks_of(x.numel(), block)
    scales, head, span = scales_to(out, blocks, scale_bytes), blocks * scale_bytes, triton.next_power_of_2(block)
    _quantize[(blocks,)](
        *(x, scales, out[head:], n, block, -(-n // 8), *halves(mix64(key)), shift, quantized.top_of(bits) / 2),
        SPAN=span,
        BITS=bits,
        SQUARED=norm == "l2",
        UP=scale_bytes == 2,
        num_warps=num_warps(span),
        # A product fused with a sum would round once where the CPU rounds twice.
        enable_fp_fusion=False,
    )
    write_back(scales, out, scale_bytes)


@on_its_device
def dequantize_(
    payload: Tensor, out: Tensor, *, bits: int, block: int, key: int, dither: bool, shift: float, scale_bytes: int
) -> None:
    """Run `thinwire.core.kernels.dequantize_`, with the same bits."""
    n, blocks = out.numel(), blocks_of(out.numel(), block)
    scales = scales_of(payload, blocks) if scale_bytes == 4 else read_scales(payload, blocks, scale_bytes)
    planes = payload[blocks * scale_bytes :]
    _dequantize[(triton.cdiv(n, SPAN),)](
        *(planes, scales, out, n, block, -(-n // 8), *halves(mix64(key)), shift, quantized.top_of(bits) / 2),
        SPAN=SPAN,
        BITS=bits,
        PER=elements_per_scale(n, block),
        DITHER=dither,
        num_warps=num_warps(SPAN),
        enable_fp_fusion=False,
    )
