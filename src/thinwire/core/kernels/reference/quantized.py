# SPDX-License-Identifier: Apache-2.0
"""Quantization to a few bits per number, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import (
    block_scales,
    blocks_of,
    in_blocks,
    read_planes,
    read_scales,
    scale_per_element,
    write_planes,
    write_scales,
)
from thinwire.core.kernels.reference.rng import uniform


def quantize_(
    x: Tensor, out: Tensor, *, bits: int, block: int, key: int, shift: float, norm: str, scale_bytes: int
) -> None:
    """Write the scales, then the bit planes of the codes."""
    n = x.numel()
    rows = in_blocks(x, block)
    scales = rows.abs().amax(1) if norm == "max" else block_scales(rows, 1.0, squared=True)
    # Encoder and decoder must use the same scales: the sent ones.
    if scale_bytes == 2:
        scales = _rounded_up(scales)
    head = len(rows) * scale_bytes
    write_scales(scales, out[:head], scale_bytes)
    scale = scale_per_element(scales, n, block)
    ratio = torch.where(scale > 0, x / scale, 0.0)
    codes = (
        _unrounded_codes(ratio, bits)
        .add_(_draws(n, key, shift, x.device))
        .floor_()
        .clamp_(0, top_of(bits))
        .to(torch.uint8)
    )
    write_planes(codes, out[head:], bits)


def dequantize_(
    payload: Tensor, out: Tensor, *, bits: int, block: int, key: int, dither: bool, shift: float, scale_bytes: int
) -> None:
    """Decode; with `dither`, subtract the random numbers of the rounding."""
    n = out.numel()
    count = blocks_of(n, block)
    scale = scale_per_element(read_scales(payload, count, scale_bytes), n, block)
    codes = read_planes(payload[count * scale_bytes :], n, bits).float()
    if dither:
        codes.sub_(_draws(n, key, shift, out.device)).add_(0.5)
    half = top_of(bits) / 2
    out.copy_((codes - half) * (scale / torch.full_like(scale, half)))


def top_of(bits: int) -> int:
    """Return the highest code."""
    return 1 if bits == 1 else 2**bits - 2


def _unrounded_codes(ratio: Tensor, bits: int) -> Tensor:
    """Map [-1, 1] to the range of the codes."""
    if bits == 1:
        return (ratio + 1) * 0.5
    half = top_of(bits) // 2
    return ratio * half + half


def _draws(n: int, key: int, shift: float, device: torch.device) -> Tensor:
    draws = uniform(n, key, device=device) + shift
    return torch.where(draws >= 1, draws - 1, draws)


def _rounded_up(scales: Tensor) -> Tensor:
    """Round up to bf16: no element of a block may exceed its scale."""
    low = scales.to(torch.bfloat16)
    up = torch.nextafter(low, torch.full_like(low, torch.inf))
    return torch.where(low.float() < scales, up, low).float()
