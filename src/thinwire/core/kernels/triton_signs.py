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
from thinwire.core.kernels.reference.bits import blocks_of, write_scales
from thinwire.core.kernels.triton_bits import fits
from thinwire.core.kernels.triton_rng import packed

_SPAN = 1024
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
    count = tl.minimum(n - start, block)
    at = tl.arange(0, SPAN)
    real = at < count
    total = tl.load(x + start + at, mask=real, other=0.0)
    if RESIDUAL:
        total += tl.load(residual + start + at, mask=real, other=0.0)
    scale = tl.sum(total * total if SQUARED else tl.abs(total), axis=0)
    scale = tl.div_rn(scale, tl.cast(count, tl.float32))
    # After an overflow the sum is computed again from numbers 2**96 times smaller.
    small = total * 1.262177448353619e-29
    again = tl.sum(small * small if SQUARED else tl.abs(small), axis=0)
    again = tl.div_rn(again, tl.cast(count, tl.float32))
    if SQUARED:
        scale = tl.sqrt_rn(scale)
        again = tl.sqrt_rn(again)
    scale = tl.where(scale == float("inf"), again * 7.922816251426434e28, scale)
    if HALF:
        scale = scale.to(tl.bfloat16).to(tl.float32)
    tl.store(scales + tl.program_id(0), scale)
    negative = tl.where(real, total.to(tl.uint32, bitcast=True) >> 31, 0)
    bytes_at = tl.arange(0, SPAN // 8)
    tl.store(stream + start // 8 + bytes_at, packed(negative, SPAN), mask=bytes_at * 8 < count)
    if RESIDUAL:
        decoded = tl.where(scale == 0.0, 0.0, tl.where(negative != 0, -scale, scale))
        tl.store(residual + start + at, total - decoded, mask=real)


@triton.jit
def _sum(streams, scales, out, n, block, blocks, count, stride, SPAN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    real = at < n
    total = tl.zeros((SPAN,), tl.float32)
    for w in range(count):
        byte = tl.load(streams + tl.cast(w, tl.int64) * stride + at // 8, mask=real, other=0).to(tl.uint32)
        scale = tl.load(scales + tl.cast(w, tl.int64) * blocks + at // block, mask=real, other=0.0)
        negative = (byte >> (at % 8).to(tl.uint32)) & 1
        total += tl.where(scale == 0.0, 0.0, tl.where(negative != 0, -scale, scale))
    tl.store(out + at, total, mask=real)


@on_its_device
def encode_signs_(x: Tensor, residual: Tensor | None, out: Tensor, *, block: int, norm: str, scale_bytes: int) -> None:
    """Run `thinwire.core.kernels.encode_signs_`; torch computes blocks that are too large for one program."""
    if not fits(block):
        signs.encode_signs_(x, residual, out, block=block, norm=norm, scale_bytes=scale_bytes)
        return
    n, blocks = x.numel(), blocks_of(x.numel(), block)
    scales, head = torch.empty(blocks, dtype=torch.float32, device=x.device), blocks * scale_bytes
    span = triton.next_power_of_2(block)
    _encode[(blocks,)](
        *(x, x if residual is None else residual, scales, out[head:], n, block),
        SPAN=span,
        RESIDUAL=residual is not None,
        SQUARED=norm == "l2",
        HALF=scale_bytes == 2,
        # A product fused with a sum would round once where the CPU rounds twice.
        enable_fp_fusion=False,
    )
    write_scales(scales, out[:head], scale_bytes)


@on_its_device
def sum_signs_(payloads: Tensor, out: Tensor, *, block: int, scale_bytes: int) -> None:
    """Run `thinwire.core.kernels.sum_signs_`, with the same bits."""
    n, blocks = out.numel(), blocks_of(out.numel(), block)
    head = blocks * scale_bytes
    scales = payloads[:, :head].clone(memory_format=torch.contiguous_format).view(_DTYPES[scale_bytes]).float()
    _sum[(triton.cdiv(n, _SPAN),)](
        *(payloads[:, head:], scales, out, n, block, blocks, len(payloads), payloads.stride(0)),
        SPAN=_SPAN,
        enable_fp_fusion=False,
    )
