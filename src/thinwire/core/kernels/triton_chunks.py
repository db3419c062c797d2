# SPDX-License-Identifier: Apache-2.0
"""The largest elements of each chunk on a GPU, with the CPU's bits: one program finds and packs those of a chunk."""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.kernels.base import on_its_device
from thinwire.core.kernels.reference.rounded import HALF_STEPS
from thinwire.core.kernels.triton_bits import load_block, num_warps, signed, store_block
from thinwire.core.kernels.triton_rounded import fitted, half_step, steps_of


@triton.jit
def _number_at(stream, index, number, width):
    """Read numbers of up to 14 bits, laid end to end in `number * width` bits."""
    end = (number * width + 7) // 8
    at, word = index * width // 8, tl.zeros_like(index)
    for byte in tl.static_range(3):
        mask = (index < number) & (at + byte < end)
        word |= tl.load(stream + at + byte, mask=mask, other=0).to(tl.int32) << (8 * byte)
    return (word >> (index * width % 8)) & ((1 << width) - 1)


@triton.jit
def _encode(
    x, residual, out, places, values, n, chunk, kept, record, width,
    SPAN: tl.constexpr, KEPT: tl.constexpr, BYTES: tl.constexpr,
    BITS: tl.constexpr, STEP: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    start = pid * chunk
    count = tl.minimum(n - start, chunk).to(tl.int32)
    k = (kept * count + chunk - 1) // chunk
    at = tl.arange(0, SPAN)
    total = load_block(x + start, at, count, SPAN)
    if RESIDUAL:
        total += load_block(residual + start, at, count, SPAN)
    # Absolute values have the order of their bits.
    keys = tl.where(at < count, total.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    groups = tl.max(tl.reshape(keys, (KEPT, SPAN // KEPT)), axis=1)
    largest = tl.max(groups, axis=0)
    # At least k elements reach the smallest maximum of as many groups. From there bisect until k elements are left, or
    # until the k-th largest is found, which several elements equal.
    low = tl.maximum(tl.min(groups, axis=0), 0)
    high = tl.minimum(largest, 0x7F800000) + 1
    found = tl.sum((keys >= low).to(tl.int32), axis=0)
    while (found > k) & (high - low > 1):
        middle = low + (high - low) // 2
        number = tl.sum((keys >= middle).to(tl.int32), axis=0)
        low, high, found = (
            tl.where(number >= k, middle, low),
            tl.where(number >= k, high, middle),
            tl.where(number >= k, number, found),
        )
    above, equal = keys > low, keys == low
    # Of equal elements the first are sent. One sum counts both kinds, in the two halves of a word.
    sums = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    needed = k - tl.sum(above.to(tl.int32), axis=0)
    chosen = above | (equal & ((sums >> 16) <= needed))
    rank = (sums & 0xFFFF) + tl.minimum(sums >> 16, needed) - 1
    # The bisection does not separate NaNs, of which there may be more than k.
    chosen = chosen & (rank >= 0) & (rank < k)
    own_places, own_values = places + pid * KEPT, values + pid * KEPT
    tl.store(own_places + rank, at, mask=chosen)
    tl.store(own_values + rank, total, mask=chosen)
    tl.debug_barrier()

    ranks = tl.arange(0, KEPT)
    value = tl.load(own_values + ranks, mask=ranks < k, other=0.0)
    half = half_step(tl.abs(value), k, STEP, BITS, KEPT)
    some = half >= 1e-30
    inverse = tl.where(some, tl.div_rn(1.0, 2 * half), 0.0)
    sizes = tl.abs(value) * inverse
    scale = tl.where(some, fitted(half, sizes, steps_of(sizes, BITS), k, KEPT), 0.0)

    to, bytes_at = out + pid * record, tl.arange(0, 4)
    tl.store(to + bytes_at, ((scale.to(tl.int32, bitcast=True) >> (8 * bytes_at)) & 255).to(tl.uint8))
    bytes_at = tl.arange(0, BYTES)
    byte = tl.zeros((BYTES,), tl.int32)
    for bit in tl.static_range(8):
        place = 8 * bytes_at + bit
        number = tl.load(own_places + place // width, mask=place < k * width, other=0)
        byte |= ((number >> (place % width)) & 1) << bit
    end = (k * width + 7) // 8
    tl.store(to + 4 + bytes_at, byte.to(tl.uint8), mask=bytes_at < end)
    bytes_at = tl.arange(0, KEPT)
    byte = tl.zeros((KEPT,), tl.int32)
    for bit in tl.static_range(8):
        place = 8 * bytes_at + bit
        value = tl.load(own_values + place // BITS, mask=place < k * BITS, other=0.0)
        sign = value.to(tl.int32, bitcast=True) >> 31
        code = (1 << (BITS - 1)) + (steps_of(tl.abs(value) * inverse, BITS) ^ sign)
        byte |= tl.where(place < k * BITS, ((code >> (place % BITS)) & 1) << bit, 0)
    tl.store(to + 4 + end + bytes_at, byte.to(tl.uint8), mask=bytes_at < (k * BITS + 7) // 8)
    if RESIDUAL:
        steps = steps_of(tl.abs(total) * inverse, BITS)
        error = total - signed((2 * steps + 1).to(tl.float32) * scale, total)
        store_block(residual + start, at, tl.where(chosen, tl.where(some, error, total), total), count, SPAN)


@triton.jit
def _add(
    payload, out, n, chunk, kept, record, width,
    SPAN: tl.constexpr, KEPT: tl.constexpr, BITS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    start = pid * chunk
    count = tl.minimum(n - start, chunk).to(tl.int32)
    k = (kept * count + chunk - 1) // chunk
    own, ranks = payload + pid * record, tl.arange(0, KEPT)
    scale = tl.load(own).to(tl.int32)
    for byte in tl.static_range(1, 4):
        scale |= tl.load(own + byte).to(tl.int32) << (8 * byte)
    place = _number_at(own + 4, ranks, k, width)
    code = _number_at(own + 4 + (k * width + 7) // 8, ranks, k, BITS)
    value = (2 * code - ((1 << BITS) - 1)).to(tl.float32) * scale.to(tl.float32, bitcast=True)
    mask = (ranks < k) & (place < count)
    if FRESH:
        at = tl.arange(0, SPAN)
        store_block(out + start, at, tl.zeros((SPAN,), tl.float32), count, SPAN)
        tl.debug_barrier()
        tl.store(out + start + place, value + 0.0, mask=mask)
    else:
        tl.store(out + start + place, tl.load(out + start + place, mask=mask, other=0.0) + value, mask=mask)


def _sizes(chunk: int, kept: int, bits: int) -> tuple[int, int]:
    """Return the bits of a position, and the bytes of the record of a whole chunk."""
    width = (chunk - 1).bit_length()
    return width, 4 + -(-kept * width // 8) + -(-kept * bits // 8)


@on_its_device
def encode_chunks_(x: Tensor, residual: Tensor | None, out: Tensor, *, chunk: int, kept: int, bits: int) -> None:
    """Run `thinwire.core.kernels.encode_chunks_`; of a chunk with NaN the record and the residual are of no use."""
    n, (width, record) = x.numel(), _sizes(chunk, kept, bits)
    chunks, span, most = triton.cdiv(n, chunk), triton.next_power_of_2(chunk), triton.next_power_of_2(kept)
    places = torch.empty(chunks * most, dtype=torch.int32, device=x.device)
    values = torch.empty(chunks * most, dtype=torch.float32, device=x.device)
    _encode[(chunks,)](
        *(x, x if residual is None else residual, out, places, values, n, chunk, kept, record, width),
        SPAN=span,
        KEPT=most,
        BYTES=triton.next_power_of_2(triton.cdiv(kept * width, 8)),
        BITS=bits,
        STEP=HALF_STEPS[min(bits, 4)],
        RESIDUAL=residual is not None,
        num_warps=num_warps(span),
        # A product fused with a sum would round once where the CPU rounds twice.
        enable_fp_fusion=False,
    )


@on_its_device
def add_chunks_(out: Tensor, payload: Tensor, *, chunk: int, kept: int, bits: int, fresh: bool) -> None:
    """Run `thinwire.core.kernels.add_chunks_`; elements outside their chunk are left out."""
    n, (width, record) = out.numel(), _sizes(chunk, kept, bits)
    span = triton.next_power_of_2(chunk)
    _add[(triton.cdiv(n, chunk),)](
        *(payload, out, n, chunk, kept, record, width),
        SPAN=span,
        KEPT=triton.next_power_of_2(kept),
        BITS=bits,
        FRESH=fresh,
        num_warps=num_warps(span),
        enable_fp_fusion=False,
    )
