# SPDX-License-Identifier: Apache-2.0
"""Rounding to the nearest of a few levels, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import (
    block_scales,
    blocks_of,
    in_blocks,
    pack_bits,
    read_scales,
    scale_per_element,
    tree_sums,
    unpack_bits,
    write_scales,
)

# As in rounded.c.
HALF_STEPS = (0.0, 1.0, 0.6240, 0.3672, 0.2101)
_SMALLEST_STEP = 1e-30


def encode_rounded_(x: Tensor, residual: Tensor | None, out: Tensor, *, bits: int, block: int) -> None:
    """Write the scales, then the bit planes of the codes; the residual keeps the rounding error."""
    n = x.numel()
    if residual is not None:
        x = residual.add_(x)
    rows = in_blocks(x, block)
    counts = torch.full((len(rows),), float(block), dtype=torch.float32, device=x.device)
    counts[-1] = n - (len(rows) - 1) * block
    scales, codes, decoded = levels_of(rows, counts, bits)
    head, plane, codes = 4 * len(rows), -(-n // 8), codes.view(-1)[:n]
    write_scales(scales, out[:head], 4)
    for bit in range(bits):
        out[head + bit * plane : head + (bit + 1) * plane].copy_(pack_bits((codes >> bit) & 1))
    if residual is not None:
        residual.copy_((rows - decoded).view(-1)[:n])


def levels_of(rows: Tensor, counts: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales [m], the codes and the decoded rows of [m, n], with `counts` real elements per row."""
    sizes, most = rows.abs(), float(2 ** (bits - 1) - 1)
    if bits > 4:
        halves = sizes.amax(1) / float(2**bits)
    else:
        halves = block_scales(rows, counts, squared=False)
        halves = torch.tensor(HALF_STEPS[bits], dtype=torch.float32, device="cpu") * halves
    some = halves >= torch.tensor(_SMALLEST_STEP, dtype=torch.float32, device="cpu")
    sizes = sizes * torch.where(some, 1 / (2 * halves), 0.0)[:, None]
    steps = torch.where(sizes < most, sizes, most).to(torch.int32)
    levels = 2 * steps + 1
    # Padding after the end of the last block does not count in any sum.
    exist = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
    squares = (levels * levels * exist).sum(1, dtype=torch.int64)
    fits = tree_sums(sizes * levels.float() * exist) / squares.float()
    scales = torch.where(some, 2 * halves * fits, 0.0)
    codes = (2 ** (bits - 1) + torch.where(rows.signbit(), ~steps, steps)).to(torch.uint8)
    decoded = torch.where(some[:, None], torch.copysign(levels.float() * scales[:, None], rows), 0.0)
    return scales, codes, decoded


def decode_rounded_(payload: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    """Decode into `out`."""
    n = out.numel()
    count, plane = blocks_of(n, block), -(-n // 8)
    codes = torch.zeros(n, dtype=torch.int32, device=out.device)
    for bit in range(bits):
        begin = count * 4 + bit * plane
        codes.add_(unpack_bits(payload[begin : begin + plane], n).to(torch.int32), alpha=1 << bit)
    scale = scale_per_element(read_scales(payload, count, 4), n, block)
    out.copy_((2 * codes - (2**bits - 1)).float() * scale)


def sum_rounded_(payloads: Tensor, out: Tensor, *, bits: int, block: int, add: bool) -> None:
    """Decode the only payload; with `add`, sum all of them in their order."""
    if not add:
        decode_rounded_(payloads[0], out, bits=bits, block=block)
        return
    part = torch.empty_like(out)
    out.zero_()
    for payload in payloads:
        decode_rounded_(payload, part, bits=bits, block=block)
        out.add_(part)
