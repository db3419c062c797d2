# SPDX-License-Identifier: Apache-2.0
"""Random numbers for the GPU kernels. Pyright cannot check Triton code."""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(word):
    """Apply the 32-bit finisher of MurmurHash3."""
    word = (word ^ (word >> 16)) * tl.full((), 0x85EBCA6B, tl.uint32)
    word = (word ^ (word >> 13)) * tl.full((), 0xC2B2AE35, tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def word_at(index, low, high):
    """Return the random 32-bit number of an index, from the two halves of a seed."""
    return mixed(mixed(tl.cast(index, tl.uint32) ^ tl.cast(low, tl.uint32)) ^ tl.cast(high, tl.uint32))


@triton.jit
def draw_at(index, low, high, shift):
    """Return a multiple of 2^-24 in [0, 1), plus `shift` modulo 1."""
    draw = (word_at(index, low, high) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 + shift
    return tl.where(draw >= 1.0, draw - 1.0, draw)


def halves(seed: int) -> tuple[int, int]:
    """Return the lower and the upper 32 bits."""
    return seed & 0xFFFFFFFF, seed >> 32
