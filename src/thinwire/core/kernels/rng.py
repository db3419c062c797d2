# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers: each is a function of a key and an index, on any device and in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.base import compiled
from thinwire.core.kernels.reference import rng as reference

mix64 = reference.mix64


def uniform(n: int, key: int, offset: int = 0, *, device: torch.device | None = None) -> Tensor:
    r"""Return multiples of $2^{-24}$ in [0, 1), fp32 [n]; element i depends only on the key and `offset + i`.

    They are two rounds of the 32-bit finisher of MurmurHash3 (Appleby 2011) over the index, each keyed by a half of
    `mix64(key)`. Only the lower 32 bits of an index count.
    """
    out = torch.empty(n, dtype=torch.float32, device=device)
    if out.is_meta:
        return out
    library = compiled(out)
    if library is None:
        return reference.uniform(n, key, offset, device=device)
    library.thinwire_uniform(out.data_ptr(), n, mix64(key), offset)
    return out
