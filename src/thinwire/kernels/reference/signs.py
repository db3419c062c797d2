"""Signs in a bit each, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.reference.bits import (
    blocks_of,
    in_blocks,
    pack_bits,
    read_scales,
    rooted,
    spread,
    tree_sums,
    unpack_bits,
    write_scales,
)


def encode_signs_(x: Tensor, error: Tensor | None, out: Tensor, *, block: int, norm: str, scale_bytes: int) -> None:
    """The scales and signs of `x + error`, and what they leave unsaid."""
    n = x.numel()
    residual = x if error is None else x + error
    rows = in_blocks(residual, block)
    sizes = torch.full((len(rows),), float(block), device=x.device)
    sizes[-1] = n - (len(rows) - 1) * block
    means = tree_sums(rows.abs() if norm == "l1" else rows.square()) / sizes
    head = len(rows) * scale_bytes
    write_scales(means if norm == "l1" else rooted(means), out[:head], scale_bytes)
    signs = torch.signbit(residual)
    out[head:].copy_(pack_bits(signs))
    if error is not None:
        error.copy_(residual - _signed(spread(read_scales(out, len(rows), scale_bytes), n, block), signs))


def decode_signs_(payload: Tensor, out: Tensor, *, block: int, scale_bytes: int) -> None:
    """Each element's scale with its sign; zero where the scale is zero."""
    n = out.numel()
    count = blocks_of(n, block)
    scales = spread(read_scales(payload, count, scale_bytes), n, block)
    out.copy_(_signed(scales, unpack_bits(payload[count * scale_bytes :], n).bool()))


def sum_signs_(payloads: Tensor, out: Tensor, *, block: int, scale_bytes: int) -> None:
    """The sum of what payloads stand for, in their order."""
    part = torch.empty_like(out)
    out.zero_()
    for payload in payloads:
        decode_signs_(payload, part, block=block, scale_bytes=scale_bytes)
        out.add_(part)


def _signed(scales: Tensor, negative: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.zeros_like(scales), torch.where(negative, -scales, scales))
