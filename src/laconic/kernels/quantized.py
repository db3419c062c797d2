"""Numbers in a few bits each, rounded at random so that their means are right.

A payload is all scales, then one plane of bits after the other, the lowest first.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from laconic.kernels.bits import blocks_of, in_blocks, pack_bits, read_scales, spread, unpack_bits, write_scales
from laconic.kernels.chance import uniform


def quantized_nbytes(n: int, bits: int, block: int, scale_bytes: int = 4) -> int:
    """Bytes of the payload of `n` elements."""
    return blocks_of(n, block) * scale_bytes + bits * -(-n // 8)


def quantize_(
    x: Tensor,
    out: Tensor,
    *,
    bits: int,
    block: int,
    key: int,
    shift: float = 0.0,
    norm: Literal["max", "l2"] = "max",
    scale_bytes: int = 4,
) -> None:
    r"""Write codes of `x` into `out`.

    With $N$ a block's scale and $s = 2^{b-1}-1$, an element's code is $\lfloor x s/N + s + u \rfloor$ in $[0, 2s]$; of
    one bit, $\lfloor (x/N + 1)/2 + u \rfloor$.

    Args:
        x: fp32, [n].
        out: uint8, `quantized_nbytes(n, bits, block, scale_bytes)`.
        bits: of a code, 1 to 8.
        block: elements that share a scale.
        key: of the draws.
        shift: added to the draws, modulo 1.
        norm: the scale is the largest absolute value, or the Euclidean norm.
        scale_bytes: 4 for fp32, 2 for bf16, rounded up.
    """
    n = x.numel()
    if n == 0:
        return
    rows = in_blocks(x, block)
    scales = rows.abs().amax(1) if norm == "max" else torch.linalg.vector_norm(rows, dim=1)
    if scale_bytes == 2:
        scales = _rounded_up(scales)
    head, plane = len(rows) * scale_bytes, -(-n // 8)
    write_scales(scales, out[:head], scale_bytes)
    scale = spread(scales, n, block)
    ratio = torch.where(scale > 0, x / scale, 0.0)
    codes = _places(ratio, bits).add_(_draws(n, key, shift, x.device)).floor_().clamp_(0, _top(bits)).to(torch.uint8)
    for bit in range(bits):
        out[head + bit * plane : head + (bit + 1) * plane].copy_(pack_bits((codes >> bit) & 1))


def dequantize_(
    payload: Tensor,
    out: Tensor,
    *,
    bits: int,
    block: int,
    key: int,
    dither: bool = False,
    shift: float = 0.0,
    scale_bytes: int = 4,
) -> None:
    """Write into `out`, fp32 [n], what codes stand for; with `dither` less the draws that rounded them."""
    n = out.numel()
    if n == 0:
        return
    count, plane = blocks_of(n, block), -(-n // 8)
    scale = spread(read_scales(payload, count, scale_bytes), n, block)
    codes = torch.zeros(n, device=out.device)
    for bit in range(bits):
        begin = count * scale_bytes + bit * plane
        codes.add_(unpack_bits(payload[begin : begin + plane], n), alpha=2.0**bit)
    if dither:
        codes.sub_(_draws(n, key, shift, out.device)).add_(0.5)
    half = _top(bits) / 2
    out.copy_((codes - half) * (scale / half))


def _top(bits: int) -> int:
    """The highest code."""
    return 1 if bits == 1 else 2**bits - 2


def _places(ratio: Tensor, bits: int) -> Tensor:
    """Where elements lie between the lowest code and the highest."""
    if bits == 1:
        return (ratio + 1) / 2
    half = _top(bits) // 2
    return ratio * half + half


def _draws(n: int, key: int, shift: float, device: torch.device) -> Tensor:
    draws = uniform(n, key, device=device) + shift
    return torch.where(draws >= 1, draws - 1, draws)


def _rounded_up(scales: Tensor) -> Tensor:
    """To bf16, so that nothing in a block is beyond its scale."""
    low = scales.to(torch.bfloat16)
    up = torch.nextafter(low, torch.full_like(low, torch.inf))
    return torch.where(low.float() < scales, up, low).float()
