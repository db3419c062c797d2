# SPDX-License-Identifier: Apache-2.0
"""Bit planes, scales and sums for the GPU kernels. Pyright cannot check Triton code.

Eight codes of up to four bits are packed into one 32-bit word before the bits of a plane are collected. This takes a
quarter of the instructions of packing each bit of each code, and at the speed of a GPU's memory they count: an H100
executes about twenty instructions in the time of loading four bytes.
"""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.kernels.reference.bits import write_scales

MAX_BLOCK = 16384
SPAN = 2048
"""The elements that a program decodes."""
PER_THREAD = 32
"""The elements of a thread, about."""


def fits(block: int) -> bool:
    """Return True if one program can hold a block, and blocks end at whole bytes."""
    return block % 8 == 0 and block <= MAX_BLOCK


def num_warps(span: int) -> int:
    """Return the warps of a program of `span` elements."""
    return max(1, min(16, span // (32 * PER_THREAD)))


def elements_per_scale(n: int, block: int) -> int:
    """Return for how many elements a program that decodes needs to load a scale: all of them, 8 or 1."""
    return SPAN if block % SPAN == 0 or block >= n else 8 if block % 8 == 0 else 1


def scales_of(payload: Tensor, blocks: int) -> Tensor:
    """Return the fp32 scales at the start of a payload: a view, or a copy if they are not aligned."""
    head = payload[: 4 * blocks]
    return (head.clone() if head.data_ptr() % 4 else head).view(torch.float32)


def scales_to(payload: Tensor, blocks: int, scale_bytes: int) -> Tensor:
    """Return fp32 scales for a kernel to write: those of the payload, or new ones for `write_back`."""
    if scale_bytes == 4 and payload.data_ptr() % 4 == 0:
        return scales_of(payload, blocks)
    return torch.empty(blocks, dtype=torch.float32, device=payload.device)


def write_back(scales: Tensor, payload: Tensor, scale_bytes: int) -> None:
    """Write the scales of `scales_to` into the payload, unless they are there."""
    if scales.data_ptr() != payload.data_ptr():
        write_scales(scales, payload[: scale_bytes * scales.numel()], scale_bytes)


@triton.jit
def signed(values, x):
    """Give positive numbers the signs of others."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (values.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def load_block(x, at, count, SPAN: tl.constexpr):
    """Load the first `count` elements of a block, and zeros after them."""
    # A mask would split the loads of four elements, since the compiler does not know the count.
    if count == SPAN:
        value = tl.load(x + at)
    else:
        value = tl.load(x + at, mask=at < count, other=0.0)
    return value


@triton.jit
def store_block(x, at, value, count, SPAN: tl.constexpr):
    """Store the first `count` elements of a block."""
    if count == SPAN:
        tl.store(x + at, value)
    else:
        tl.store(x + at, value, mask=at < count)


@triton.jit
def load_scale(scales, start, count, block, PER: tl.constexpr, SPAN: tl.constexpr):
    """Load the scales of `count` elements from `start` on, for elements [SPAN / 8, 8]; `PER` elements have one."""
    if PER == SPAN:
        scale = tl.load(scales + start // block)
    elif PER == 8:
        at = 8 * tl.arange(0, SPAN // 8)
        scale = tl.load(scales + (start + at) // block, mask=at < count, other=0.0)[:, None]
    else:
        at = in_groups(SPAN)
        scale = tl.load(scales + (start + at) // block, mask=at < count, other=0.0)
    return scale


@triton.jit
def in_groups(SPAN: tl.constexpr):
    """Return the indices of elements [SPAN / 8, 8]."""
    return tl.arange(0, SPAN // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def tree_sum(x, SPAN: tl.constexpr):
    """Sum numbers without negative ones, [SPAN], in the order of the compiled kernels (`reference.bits.tree_sums`)."""
    LEVELS: tl.constexpr = 0 if SPAN <= 16 else (SPAN // 16).bit_length() - 1
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (SPAN // (32 << level), 2, 16)), axis=1)
    LANES: tl.constexpr = SPAN if SPAN <= 16 else 16
    x = tl.reshape(x, (LANES,))
    for level in tl.static_range(LANES.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (2, LANES >> (level + 1))), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def nibbles(codes, SPAN: tl.constexpr):
    """Pack codes of four bits, uint32 [SPAN], into words [SPAN / 8], the first in the lowest bits."""
    rows = tl.reshape(codes, (SPAN // 8, 8))
    return tl.sum(rows << (4 * tl.arange(0, 8))[None, :].to(tl.uint32), axis=1)


@triton.jit
def plane_of(words, bit):
    """Collect one bit of each of a word's eight codes in a byte."""
    y = (words >> bit) & 0x11111111
    y = (y | (y >> 3)) & 0x03030303
    y = (y | (y >> 6)) & 0x000F000F
    return (y | (y >> 12)).to(tl.uint8)


@triton.jit
def spread(byte):
    """Reverse `plane_of`: bit j of a byte becomes bit 4j of a word."""
    y = byte.to(tl.uint32)
    y = (y | (y << 12)) & 0x000F000F
    y = (y | (y << 6)) & 0x03030303
    return (y | (y << 3)) & 0x11111111


@triton.jit
def store_planes(planes, plane, codes, count, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Store the bit planes of codes, uint32 [SPAN], from `planes` on, with `plane` bytes from one to the next."""
    at = tl.arange(0, SPAN // 8)
    # The unused bits of the last byte are zero.
    left = tl.minimum(tl.maximum(count - 8 * at, 0), 8)
    used = tl.where(left == 8, 0xFFFFFFFF, (1 << (4 * (left & 7)).to(tl.uint32)) - 1).to(tl.uint32)
    for half in tl.static_range((BITS + 3) // 4):
        words = nibbles((codes >> (4 * half)) & 15 if BITS > 4 else codes, SPAN) & used
        for bit in tl.static_range(BITS - 4 * half if BITS - 4 * half < 4 else 4):
            where = planes + (4 * half + bit) * tl.cast(plane, tl.int64)
            tl.store(where + at, plane_of(words, bit), mask=8 * at < count)


@triton.jit
def load_planes(planes, plane, count, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Load codes, uint32 [SPAN / 8, 8], from bit planes."""
    at = tl.arange(0, SPAN // 8)
    shifts = (4 * tl.arange(0, 8))[None, :].to(tl.uint32)
    codes = tl.zeros((SPAN // 8, 8), tl.uint32)
    for half in tl.static_range((BITS + 3) // 4):
        words = tl.zeros((SPAN // 8,), tl.uint32)
        for bit in tl.static_range(BITS - 4 * half if BITS - 4 * half < 4 else 4):
            where = planes + (4 * half + bit) * tl.cast(plane, tl.int64)
            words |= spread(tl.load(where + at, mask=8 * at < count, other=0)) << bit
        codes |= ((words[:, None] >> shifts) & 15) << (4 * half)
    return codes
