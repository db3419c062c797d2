# SPDX-License-Identifier: Apache-2.0
"""One bit per number, its sign, on a GPU: each block is read once, and its scale stays in registers until it is used.

A scale is summed in an order that suits the device, so its last bits may differ from the CPU's. The signs are equal,
the residual matches the sent scale, and payloads decode to the same bits everywhere.
"""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.kernels.base import on_its_device
from thinwire.core.kernels.reference import signs
from thinwire.core.kernels.reference.bits import blocks_of
from thinwire.core.kernels.triton_bits import (
    SPAN,
    elements_per_scale,
    fits,
    in_groups,
    load_block,
    load_scale,
    num_warps,
    scales_of,
    scales_to,
    signed,
    store_block,
    store_planes,
    write_back,
)

_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@triton.jit
def _encode(
    x,
    residual,
    scales,
    stream,
    n,
    block,
    SPAN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SQUARED: tl.constexpr,
    HALF: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * block
    count = tl.minimum(n - start, block).to(tl.int32)
    at = tl.arange(0, SPAN)
    total = load_block(x + start, at, count, SPAN)
    if RESIDUAL:
        total += load_block(residual + start, at, count, SPAN)
    scale = tl.sum(total * total if SQUARED else tl.abs(total), axis=0)
    scale = tl.div_rn(scale, tl.cast(count, tl.float32))
    if scale == float("inf"):
        # After an overflow the sum is computed again from numbers 2**96 times smaller.
        small = total * 1.262177448353619e-29
        again = tl.div_rn(tl.sum(small * small if SQUARED else tl.abs(small), axis=0), tl.cast(count, tl.float32))
        scale = (tl.sqrt_rn(again) if SQUARED else again) * 7.922816251426434e28
    elif SQUARED:
        scale = tl.sqrt_rn(scale)
    if HALF:
        scale = scale.to(tl.bfloat16).to(tl.float32)
    tl.store(scales + tl.program_id(0), scale)
    store_planes(stream + start // 8, 0, total.to(tl.uint32, bitcast=True) >> 31, count, 1, SPAN)
    if RESIDUAL:
        decoded = tl.where(scale == 0.0, 0.0, signed(scale + tl.zeros_like(total), total))
        store_block(residual + start, at, total - decoded, count, SPAN)


@triton.jit
def _sum(streams, scales, out, n, block, blocks, number, stride, SPAN: tl.constexpr, PER: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SPAN
    count = tl.minimum(n - start, SPAN).to(tl.int32)
    groups = tl.arange(0, SPAN // 8)
    shifts = (31 - tl.arange(0, 8))[None, :].to(tl.uint32)
    total = tl.zeros((SPAN // 8, 8), tl.float32)
    for w in range(number):
        own = streams + tl.cast(w, tl.int64) * stride + start // 8
        byte = tl.load(own + groups, mask=8 * groups < count, other=0).to(tl.uint32)
        sign = (byte[:, None] << shifts) & 0x80000000
        scale = load_scale(scales + tl.cast(w, tl.int64) * blocks, start, count, block, PER, SPAN)
        # A zero with a sign adds nothing to the zero at the start.
        total += (scale.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    store_block(out + start, in_groups(SPAN), total, count, SPAN)


@on_its_device
def encode_signs_(x: Tensor, residual: Tensor | None, out: Tensor, *, block: int, norm: str, scale_bytes: int) -> None:
    """Run `thinwire.core.kernels.encode_signs_`; torch computes blocks that are too large for one program."""
    if not fits(block):
        signs.encode_signs_(x, residual, out, block=block, norm=norm, scale_bytes=scale_bytes)
        return
    n, blocks = x.numel(), blocks_of(x.numel(), block)
    head = blocks * scale_bytes
    scales = scales_to(out, blocks, scale_bytes)
    span = triton.next_power_of_2(block)
    _encode[(blocks,)](
        *(x, x if residual is None else residual, scales, out[head:], n, block),
        SPAN=span,
        RESIDUAL=residual is not None,
        SQUARED=norm == "l2",
        HALF=scale_bytes == 2,
        num_warps=num_warps(span),
        # A product fused with a sum would round once where the CPU rounds twice.
        enable_fp_fusion=False,
    )
    write_back(scales, out, scale_bytes)


@on_its_device
def sum_signs_(payloads: Tensor, out: Tensor, *, block: int, scale_bytes: int) -> None:
    """Run `thinwire.core.kernels.sum_signs_`, with the same bits."""
    n, blocks = out.numel(), blocks_of(out.numel(), block)
    head = blocks * scale_bytes
    if len(payloads) == 1 and scale_bytes == 4:
        scales = scales_of(payloads[0], blocks)
    else:
        scales = payloads[:, :head].clone(memory_format=torch.contiguous_format).view(_DTYPES[scale_bytes]).float()
    _sum[(triton.cdiv(n, SPAN),)](
        *(payloads[:, head:], scales, out, n, block, blocks, len(payloads), payloads.stride(0)),
        SPAN=SPAN,
        PER=elements_per_scale(n, block),
        num_warps=num_warps(SPAN),
        enable_fp_fusion=False,
    )
