# SPDX-License-Identifier: Apache-2.0
"""Pack flags and scales into bytes, and sum in a fixed order. Bit j of byte k is element 8k + j."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 16


def pack_bits(flags: Tensor) -> Tensor:
    """Pack flags of 0 and 1, [n], into uint8 [ceil(n/8)]; the unused bits of the last byte are 0."""
    n = flags.numel()
    padded = torch.zeros(-(-n // 8) * 8, dtype=torch.uint8, device=flags.device)
    padded[:n] = flags
    return (padded.view(-1, 8) << _shifts(flags.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """Return the first `n` flags, uint8 [n]."""
    return ((packed[:, None] >> _shifts(packed.device)) & 1).reshape(-1)[:n]


def write_planes(codes: Tensor, out: Tensor, bits: int) -> None:
    """Write codes of so many bits each, uint8 [n], as bit planes, the lowest first."""
    for bit, plane in enumerate(out.view(bits, -1)):
        plane.copy_(pack_bits((codes >> bit) & 1))


def read_planes(planes: Tensor, n: int, bits: int) -> Tensor:
    """Reverse `write_planes`; int32 [n]."""
    codes = torch.zeros(n, dtype=torch.int32, device=planes.device)
    for bit, plane in enumerate(planes.view(bits, -1)):
        codes.add_(unpack_bits(plane, n).to(torch.int32), alpha=1 << bit)
    return codes


def pack_numbers(numbers: Tensor, width: int) -> Tensor:
    """Lay numbers of `width` bits each, int64 [m, k], end to end, each row in whole bytes; the lowest bit first."""
    flags = ((numbers[:, :, None] >> torch.arange(width, device=numbers.device)) & 1).flatten(1)
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[1] % 8))
    return pack_bits(padded.reshape(-1).to(torch.uint8)).view(len(numbers), -1)


def unpack_numbers(packed: Tensor, width: int, k: int) -> Tensor:
    """Reverse `pack_numbers`; int64 [m, k]."""
    flags = unpack_bits(packed.reshape(-1), packed.numel() * 8).view(len(packed), -1)[:, : k * width]
    return (flags.reshape(len(packed), k, width).long() << torch.arange(width, device=packed.device)).sum(2)


def blocks_of(n: int, block: int) -> int:
    """Return the number of blocks that `n` elements fill, the last one perhaps in part."""
    return -(-n // block)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Reshape a vector [n] to [blocks, block], padded with zeros."""
    count = blocks_of(x.numel(), block)
    if count * block == x.numel():
        return x.view(count, block)
    padded = x.new_zeros(count * block)
    padded[: x.numel()] = x
    return padded.view(count, block)


def block_sizes(n: int, block: int, device: torch.device) -> Tensor:
    """Return the elements of each block as fp32: the last one may have fewer."""
    sizes = torch.full((blocks_of(n, block),), float(block), dtype=torch.float32, device=device)
    sizes[-1] = n - (len(sizes) - 1) * block
    return sizes


def tree_sums(rows: Tensor) -> Tensor:
    """Sum rows [m, n] without negative elements, in the order of the compiled kernels.

    Rows are split into strips of sixteen lanes; adjacent strips are added until one is left, then its halves.
    """
    # Without negative elements the padding changes no bit, not even the sign of a zero.
    strips = in_lanes(rows)
    while strips.shape[1] > 1:
        if strips.shape[1] % 2:
            strips = torch.cat([strips, torch.zeros_like(strips[:, :1])], 1)
        strips = strips[:, 0::2] + strips[:, 1::2]
    lanes = strips[:, 0]
    while (half := lanes.shape[1] // 2) > 0:
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def block_scales(rows: Tensor, counts: Tensor | float, *, squared: bool) -> Tensor:
    """Return the sum of absolute values of each row [m, n] over `counts`; with `squared` the root mean square.

    If a sum of finite numbers overflows, it is computed again from numbers 2**96 times smaller.
    """

    def measure(rows: Tensor) -> Tensor:
        means = tree_sums(rows.square() if squared else rows.abs()) / counts
        return exact_sqrt(means) if squared else means

    scales = measure(rows)
    # On a GPU both are computed, since the host would have to wait for the answer.
    if scales.device.type != "cpu" or bool((scales == torch.inf).any()):
        scales = torch.where(scales == torch.inf, measure(rows * 2.0**-96) * 2.0**96, scales)
    return scales


def exact_sqrt(x: Tensor) -> Tensor:
    """Return correctly rounded square roots; the last bit of torch's own in fp32 may be wrong."""
    return x.double().sqrt().float()


def in_lanes(rows: Tensor) -> Tensor:
    """Reshape rows [m, n] to [m, strips, 16], padded with zeros."""
    missing = -rows.shape[1] % LANES
    return torch.nn.functional.pad(rows, (0, missing)).view(len(rows), -1, LANES)


def write_scales(scales: Tensor, out: Tensor, scale_bytes: int) -> None:
    """Write scales, fp32 [m], into bytes [m * scale_bytes], as fp32 or rounded to bf16."""
    out.copy_(scales.to(_DTYPES[scale_bytes]).view(torch.uint8))


def read_scales(payload: Tensor, count: int, scale_bytes: int) -> Tensor:
    """Return the first `count` scales of a payload, fp32."""
    # A copy, because the bytes may not be aligned for floats.
    return payload[: count * scale_bytes].clone().view(_DTYPES[scale_bytes]).float()


def scale_per_element(scales: Tensor, n: int, block: int) -> Tensor:
    """Repeat each block's scale for its elements, [n]."""
    return scales[:, None].expand(-1, block).reshape(-1)[:n]


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


_DTYPES = {2: torch.bfloat16, 4: torch.float32}
