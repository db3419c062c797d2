# SPDX-License-Identifier: Apache-2.0
"""One bit per number, its sign, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import (
    block_scales,
    block_sizes,
    blocks_of,
    in_blocks,
    pack_bits,
    read_scales,
    scale_per_element,
    unpack_bits,
    write_scales,
)


def encode_signs_(x: Tensor, residual: Tensor | None, out: Tensor, *, block: int, norm: str, scale_bytes: int) -> None:
    """Encode `x + residual` as scales and signs, and keep the error in the residual."""
    n = x.numel()
    total = x if residual is None else x + residual
    rows = in_blocks(total, block)
    head = len(rows) * scale_bytes
    write_scales(block_scales(rows, block_sizes(n, block, x.device), squared=norm == "l2"), out[:head], scale_bytes)
    signs = torch.signbit(total)
    out[head:].copy_(pack_bits(signs))
    if residual is not None:
        # The sent scales are rounded, and the residual must be the receiver's error.
        sent = scale_per_element(read_scales(out, len(rows), scale_bytes), n, block)
        residual.copy_(total - _signed(sent, signs))


def decode_signs_(payload: Tensor, out: Tensor, *, block: int, scale_bytes: int) -> None:
    """Decode each element to its scale with its sign; zero if the scale is zero."""
    n = out.numel()
    count = blocks_of(n, block)
    scales = scale_per_element(read_scales(payload, count, scale_bytes), n, block)
    out.copy_(_signed(scales, unpack_bits(payload[count * scale_bytes :], n).bool()))


def sum_signs_(payloads: Tensor, out: Tensor, *, block: int, scale_bytes: int) -> None:
    """Decode payloads and sum them in their order."""
    part = torch.empty_like(out)
    out.zero_()
    for payload in payloads:
        decode_signs_(payload, part, block=block, scale_bytes=scale_bytes)
        out.add_(part)


def _signed(scales: Tensor, negative: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.zeros_like(scales), torch.where(negative, -scales, scales))
