# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers in torch: each is a function of a key and an index."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF


def mix64(key: int) -> int:
    """Hash a key of any size to 64 bits (the finisher of MurmurHash3, Appleby 2011)."""
    word = key & _LONG
    word = (word ^ (word >> 33)) * 0xFF51AFD7ED558CCD & _LONG
    word = (word ^ (word >> 33)) * 0xC4CEB9FE1A85EC53 & _LONG
    return word ^ (word >> 33)


def words(n: int, key: int, offset: int = 0, *, device: torch.device | None = None) -> Tensor:
    """Return random 32-bit numbers, int64 [n]; element i depends only on the key and on `offset + i`."""
    return words_at(torch.arange(offset, offset + n, dtype=torch.int64, device=device), key)


def words_at(places: Tensor, key: int) -> Tensor:
    """Return the random 32-bit numbers at these positions, int64, as int64."""
    seed = mix64(key)
    return _mix32(_mix32((places ^ (seed & _WORD)) & _WORD) ^ (seed >> 32))


def uniform(n: int, key: int, offset: int = 0, *, device: torch.device | None = None) -> Tensor:
    """Return multiples of 2^-24 in [0, 1), fp32 [n]."""
    return (words(n, key, offset, device=device) >> 8).to(torch.float32) * 2.0**-24


def _mix32(word: Tensor) -> Tensor:
    word = (word ^ (word >> 16)) * 0x85EBCA6B & _WORD
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & _WORD
    return word ^ (word >> 16)
