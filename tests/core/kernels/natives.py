# SPDX-License-Identifier: Apache-2.0
"""Numbers to test the kernels with, and comparisons of C with torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def drawn(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def mixed(word: int) -> int:
    """The mixing of 32 bits, in whole numbers of any size."""
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def by_both(work: Callable[..., list[Tensor]], *arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What some calls of the kernels give by C, and by torch."""
    ours = work(*arguments)
    with patch.dict(os.environ, THINWIRE_NATIVE="0"):
        return ours, work(*arguments)


def agree(work: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
    """What some calls of the kernels give, after C and torch have given the same bits."""
    ours, theirs = by_both(work, *arguments)
    assert all(same(one, other) for one, other in zip(ours, theirs, strict=True))
    return ours


def same_bits(a: Tensor, b: Tensor) -> bool:
    return _bits(a).equal(_bits(b))


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, but for the kind of NaN."""
    return a.shape == b.shape and bool(((_bits(a) == _bits(b)) | (a.isnan() & b.isnan())).all())


def _bits(x: Tensor) -> Tensor:
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}
    return x.view(integers[x.dtype]) if x.dtype in integers else x
