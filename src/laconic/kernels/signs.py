"""Signs in a bit each, with a scale for every block.

A payload is all scales, then all signs: the bit of an element is that of its sign, so that -0.0 counts as negative.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from laconic.kernels.bits import blocks_of, in_blocks, pack_bits, read_scales, spread, unpack_bits, write_scales


def sign_nbytes(n: int, block: int, scale_bytes: int = 4) -> int:
    """Bytes of the payload of `n` elements."""
    return blocks_of(n, block) * scale_bytes + -(-n // 8)


def encode_signs_(
    x: Tensor,
    error: Tensor | None,
    out: Tensor,
    *,
    block: int,
    norm: Literal["l1", "l2"] = "l1",
    scale_bytes: int = 4,
) -> None:
    r"""Write the signs and scales of `x + error` into `out`, and what they leave unsaid into `error`.

    The scale of a block is its mean absolute value ("l1") or its root mean square ("l2"), over elements that exist,
    rounded as it travels; what is left unsaid is measured from the rounded one.

    Args:
        x: fp32, [n].
        error: fp32, [n]; None is zero, and nothing is kept.
        out: uint8, `sign_nbytes(n, block, scale_bytes)`.
        block: elements that share a scale.
        norm: of the scales.
        scale_bytes: 4 for fp32, 2 for bf16.
    """
    n = x.numel()
    if n == 0:
        return
    owed = x if error is None else x + error
    rows = in_blocks(owed, block)
    sizes = torch.full((len(rows),), float(block), device=x.device)
    sizes[-1] = n - (len(rows) - 1) * block
    sums = rows.abs().sum(1) if norm == "l1" else rows.square().sum(1)
    scales = sums / sizes if norm == "l1" else (sums / sizes).sqrt()
    head = len(rows) * scale_bytes
    write_scales(scales, out[:head], scale_bytes)
    signs = torch.signbit(owed)
    out[head:].copy_(pack_bits(signs))
    if error is not None:
        error.copy_(owed - _signed(spread(read_scales(out, len(rows), scale_bytes), n, block), signs))


def decode_signs_(payload: Tensor, out: Tensor, *, block: int, scale_bytes: int = 4) -> None:
    """Write into `out`, fp32 [n], each element's scale with its sign; zero where the scale is zero."""
    n = out.numel()
    if n == 0:
        return
    count = blocks_of(n, block)
    scales = spread(read_scales(payload, count, scale_bytes), n, block)
    out.copy_(_signed(scales, unpack_bits(payload[count * scale_bytes :], n).bool()))


def sum_signs_(payloads: Tensor, out: Tensor, *, block: int, scale_bytes: int = 4) -> None:
    """Write into `out`, fp32 [n], the sum of what payloads, uint8 [m, bytes], stand for, in their order."""
    part = torch.empty_like(out)
    out.zero_()
    for payload in payloads:
        decode_signs_(payload, part, block=block, scale_bytes=scale_bytes)
        out.add_(part)


def _signed(scales: Tensor, negative: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.zeros_like(scales), torch.where(negative, -scales, scales))
