"""Signs in a bit each, on a GPU: a block is read once, and its scale never leaves the registers before it is used.

A scale is summed in the order that suits the device, so that its last bits may differ from the CPU's; the signs are the
same, what is left unsaid fits the scale that is sent, and what payloads stand for is the same everywhere.
"""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference import signs
from thinwire.kernels.reference.bits import blocks_of, write_scales
from thinwire.kernels.triton_rng import fits, packed

_SPAN = 1024
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@triton.jit
def _encode(
    x,
    error,
    scales,
    stream,
    n,
    block,
    SPAN: tl.constexpr,
    OWED: tl.constexpr,
    SQUARED: tl.constexpr,
    HALF: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * block
    count = tl.minimum(n - start, block)
    at = tl.arange(0, SPAN)
    real = at < count
    residual = tl.load(x + start + at, mask=real, other=0.0)
    if OWED:
        residual += tl.load(error + start + at, mask=real, other=0.0)
    scale = tl.sum(residual * residual if SQUARED else tl.abs(residual), axis=0)
    scale = tl.div_rn(scale, tl.cast(count, tl.float32))
    if SQUARED:
        scale = tl.sqrt_rn(scale)
    if HALF:
        scale = scale.to(tl.bfloat16).to(tl.float32)
    tl.store(scales + tl.program_id(0), scale)
    negative = tl.where(real, residual.to(tl.uint32, bitcast=True) >> 31, 0)
    bytes_at = tl.arange(0, SPAN // 8)
    tl.store(stream + start // 8 + bytes_at, packed(negative, SPAN), mask=bytes_at * 8 < count)
    if OWED:
        said = tl.where(scale == 0.0, 0.0, tl.where(negative != 0, -scale, scale))
        tl.store(error + start + at, residual - said, mask=real)


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


def encode_signs_(x: Tensor, error: Tensor | None, out: Tensor, *, block: int, norm: str, scale_bytes: int) -> None:
    """As `thinwire.kernels.encode_signs_`; blocks that no program can hold are left to torch."""
    if not fits(block):
        signs.encode_signs_(x, error, out, block=block, norm=norm, scale_bytes=scale_bytes)
        return
    n, blocks = x.numel(), blocks_of(x.numel(), block)
    scales, head = torch.empty(blocks, device=x.device), blocks * scale_bytes
    span = triton.next_power_of_2(block)
    _encode[(blocks,)](
        *(x, x if error is None else error, scales, out[head:], n, block),
        SPAN=span,
        OWED=error is not None,
        SQUARED=norm == "l2",
        HALF=scale_bytes == 2,
        enable_fp_fusion=False,
    )
    write_scales(scales, out[:head], scale_bytes)


def sum_signs_(payloads: Tensor, out: Tensor, *, block: int, scale_bytes: int) -> None:
    """As `thinwire.kernels.sum_signs_`, to the last bit."""
    n, blocks = out.numel(), blocks_of(out.numel(), block)
    head = blocks * scale_bytes
    scales = payloads[:, :head].clone(memory_format=torch.contiguous_format).view(_DTYPES[scale_bytes]).float()
    _sum[(triton.cdiv(n, _SPAN),)](
        *(payloads[:, head:], scales, out, n, block, blocks, len(payloads), payloads.stride(0)),
        SPAN=_SPAN,
        enable_fp_fusion=False,
    )
