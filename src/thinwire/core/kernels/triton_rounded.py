# SPDX-License-Identifier: Apache-2.0
"""Rounding to the nearest of a few levels on a GPU, with the CPU's bits: sums are added in the same order."""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.kernels.base import on_its_device
from thinwire.core.kernels.reference import rounded
from thinwire.core.kernels.reference.bits import blocks_of
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
    signed,
    store_block,
    store_planes,
    tree_sum,
    write_back,
)


@triton.jit
def half_step(sizes, count, STEP: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Return half the distance of levels for a block of absolute values, before it is fitted."""
    if BITS > 4:
        # Absolute values have the order of their bits, with NaN above all: the largest bits keep a NaN.
        largest = tl.max(sizes.to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
        half = largest * (1.0 / (1 << BITS))
    else:
        number = tl.cast(count, tl.float32)
        mean = tl.div_rn(tree_sum(sizes, SPAN), number)
        if mean == float("inf"):
            # After an overflow the sum is computed again from numbers 2**96 times smaller.
            mean = tl.div_rn(tree_sum(sizes * 1.262177448353619e-29, SPAN), number) * 7.922816251426434e28
        half = mean * STEP
    return half


@triton.jit
def steps_of(sizes, BITS: tl.constexpr):
    """Return the level of each absolute value, counted from zero; the highest one for NaN."""
    most: tl.constexpr = (1 << (BITS - 1)) - 1.0
    return tl.where(sizes < most, sizes, most).to(tl.int32)


@triton.jit
def fitted(half, sizes, steps, count, SPAN: tl.constexpr):
    """Return the scale that fits best to the levels of a block, whose sizes are zero after the first `count`."""
    levels = 2 * steps + 1
    squares = tl.sum(levels * levels, axis=0) - (SPAN - count)
    return 2 * half * tl.div_rn(tree_sum(sizes * levels.to(tl.float32), SPAN), tl.cast(squares, tl.float32))


@triton.jit
def _encode(
    x, residual, scales, planes, n, block, plane,
    SPAN: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * block
    count = tl.minimum(n - start, block).to(tl.int32)
    at = tl.arange(0, SPAN)
    total = load_block(x + start, at, count, SPAN)
    if RESIDUAL:
        total += load_block(residual + start, at, count, SPAN)
    half = half_step(tl.abs(total), count, STEP, BITS, SPAN)
    some = half >= 1e-30
    inverse = tl.where(some, tl.div_rn(1.0, 2 * half), 0.0)
    sizes = tl.abs(total) * inverse
    steps = steps_of(sizes, BITS)
    scale = tl.where(some, fitted(half, sizes, steps, count, SPAN), 0.0)
    tl.store(scales + tl.program_id(0), scale)
    codes = (1 << (BITS - 1)) + (steps ^ (total.to(tl.int32, bitcast=True) >> 31))
    store_planes(planes + start // 8, plane, codes.to(tl.uint32, bitcast=True), count, BITS, SPAN)
    if RESIDUAL:
        error = total - signed((2 * steps + 1).to(tl.float32) * scale, total)
        store_block(residual + start, at, tl.where(some, error, total), count, SPAN)


@triton.jit
def _decode(
    payloads, scales, out, n, block, head, plane, number, stride, scale_stride,
    SPAN: tl.constexpr, BITS: tl.constexpr, PER: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * SPAN
    count = tl.minimum(n - start, SPAN).to(tl.int32)
    total = tl.zeros((SPAN // 8, 8), tl.float32)
    for w in range(number):
        own = payloads + tl.cast(w, tl.int64) * stride + head + start // 8
        codes = load_planes(own, plane, count, BITS, SPAN)
        scale = load_scale(scales + tl.cast(w, tl.int64) * scale_stride, start, count, block, PER, SPAN)
        value = (2 * codes.to(tl.int32) - ((1 << BITS) - 1)).to(tl.float32) * scale
        total = total + value if SUM else value
    store_block(out + start, in_groups(SPAN), total, count, SPAN)


@on_its_device
def encode_rounded_(x: Tensor, residual: Tensor | None, out: Tensor, *, bits: int, block: int) -> None:
    """Run `thinwire.core.kernels.encode_rounded_`; torch computes blocks that are too large for one program."""
    if not fits(block):
        rounded.encode_rounded_(x, residual, out, bits=bits, block=block)
        return
    n, blocks = x.numel(), blocks_of(x.numel(), block)
    scales, span = scales_to(out, blocks, 4), triton.next_power_of_2(block)
    _encode[(blocks,)](
        *(x, x if residual is None else residual, scales, out[4 * blocks :], n, block, -(-n // 8)),
        SPAN=span,
        BITS=bits,
        STEP=rounded.HALF_STEPS[min(bits, 4)],
        RESIDUAL=residual is not None,
        num_warps=num_warps(span),
        # A product fused with a sum would round once where the CPU rounds twice.
        enable_fp_fusion=False,
    )
    write_back(scales, out, 4)


@on_its_device
def sum_rounded_(payloads: Tensor, out: Tensor, *, bits: int, block: int, add: bool) -> None:
    """Decode the only payload of uint8 [1, bytes]; with `add`, sum the payloads of [m, bytes] in their order."""
    n, blocks, number = out.numel(), blocks_of(out.numel(), block), len(payloads)
    if number == 1:
        scales = scales_of(payloads[0], blocks)
    else:
        scales = payloads[:, : 4 * blocks].clone(memory_format=torch.contiguous_format).view(torch.float32)
    _decode[(triton.cdiv(n, SPAN),)](
        *(payloads, scales, out, n, block, 4 * blocks, -(-n // 8), number, payloads.stride(0), blocks),
        SPAN=SPAN,
        BITS=bits,
        PER=elements_per_scale(n, block),
        SUM=add,
        num_warps=num_warps(SPAN),
        enable_fp_fusion=False,
    )
