# SPDX-License-Identifier: Apache-2.0
"""Rounding to the nearest of a few levels, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import (
    block_scales,
    block_sizes,
    blocks_of,
    in_blocks,
    read_planes,
    read_scales,
    scale_per_element,
    tree_sums,
    write_planes,
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
    scales, codes, decoded = levels_of(rows, block_sizes(n, block, x.device), bits)
    head = 4 * len(rows)
    write_scales(scales, out[:head], 4)
    write_planes(codes.view(-1)[:n], out[head:], bits)
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
    count = blocks_of(n, block)
    codes = read_planes(payload[4 * count :], n, bits)
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
