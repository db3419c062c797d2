"""Random numbers that are a function of their place: the same wherever, and in whatever order, they are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.base import compiled
from thinwire.kernels.reference import rng as chance

mix64 = chance.mix64


def uniform(n: int, key: int, offset: int = 0, *, device: torch.device | None = None) -> Tensor:
    r"""Multiples of $2^{-24}$ in [0, 1), fp32 [n]; element i depends on the key and on `offset + i` alone.

    Two rounds of the 32-bit finisher of MurmurHash3 (Appleby 2011) over the place, each keyed by a half of
    `mix64(key)`. Only 32 bits of a place count.
    """
    out = torch.empty(n, dtype=torch.float32, device=device)
    library = compiled(out)
    if library is None:
        return chance.uniform(n, key, offset, device=device)
    library.thinwire_uniform(out.data_ptr(), n, mix64(key), offset)
    return out
