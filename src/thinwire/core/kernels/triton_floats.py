# SPDX-License-Identifier: Apache-2.0
"""Powers of two as codes, their signs and exponents, on a GPU with the CPU's bits."""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.kernels.base import on_its_device
from thinwire.core.kernels.reference.rng import mix64
from thinwire.core.kernels.triton_bits import SPAN, in_groups, load_block, num_warps, store_block, store_planes
from thinwire.core.kernels.triton_rng import draw_at, halves


@triton.jit(do_not_specialize=["low", "high"])
def _encode(x, out, n, low, high, SPAN: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SPAN
    count = tl.minimum(n - start, SPAN).to(tl.int32)
    at = tl.arange(0, SPAN)
    bits = load_block(x + start, at, count, SPAN).to(tl.int32, bitcast=True)
    # The mantissa over 2**23 is the probability of rounding up.
    up = (bits & 0x7FFFFF).to(tl.float32) * 1.1920928955078125e-07 > draw_at(start + at, low, high, 0.0)
    # Exponent 255 would be infinity.
    exponents = tl.minimum(((bits & 0x7FFFFFFF) >> 23) + up.to(tl.int32), 254)
    store_block(out + start, at, exponents.to(tl.uint8), count, SPAN)
    store_planes(out + n + start // 8, 0, bits.to(tl.uint32, bitcast=True) >> 31, count, 1, SPAN)


@triton.jit
def _decode(payload, out, n, SPAN: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SPAN
    count = tl.minimum(n - start, SPAN).to(tl.int32)
    groups, at = tl.arange(0, SPAN // 8), in_groups(SPAN)
    exponents = load_block(payload + start, at, count, SPAN).to(tl.uint32)
    signs = tl.load(payload + n + start // 8 + groups, mask=8 * groups < count, other=0).to(tl.uint32)
    sign = (signs[:, None] << (31 - tl.arange(0, 8))[None, :].to(tl.uint32)) & 0x80000000
    store_block(out + start, at, ((exponents << 23) | sign).to(tl.float32, bitcast=True), count, SPAN)


@on_its_device
def encode_powers(x: Tensor, *, key: int) -> Tensor:
    """Run `thinwire.core.kernels.encode_powers`, with the same bits."""
    n = x.numel()
    out = torch.empty(n + -(-n // 8), dtype=torch.uint8, device=x.device)
    _encode[(triton.cdiv(n, SPAN),)](
        *(x, out, n, *halves(mix64(key))), SPAN=SPAN, num_warps=num_warps(SPAN), enable_fp_fusion=False
    )
    return out


@on_its_device
def decode_powers(payload: Tensor, n: int) -> Tensor:
    """Run `thinwire.core.kernels.decode_powers`, with the same bits."""
    out = torch.empty(n, dtype=torch.float32, device=payload.device)
    _decode[(triton.cdiv(n, SPAN),)](payload, out, n, SPAN=SPAN, num_warps=num_warps(SPAN))
    return out
