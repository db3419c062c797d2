# SPDX-License-Identifier: Apache-2.0
"""Dropout with a mask that does not depend on the mesh: a hash of each element's index in the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.tape import recorded

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
_FIRST = -0x40A7B892E31B1A47  # the two multipliers of SplitMix64
_SECOND = -0x6B2FB644ECCEEE15


class Dropout2D(nn.Module):
    """Zero each element with probability `p` and scale the others by 1 / (1 - p).

    The random number of an element is a hash of the seed, the layer's number, the number of earlier calls, and the
    element's index in the whole tensor. The blocks of one tensor therefore have independent masks, every mesh has the
    same mask, and ranks with replicas of a block agree.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, for the hash.

    Args:
        p: probability of zero, in [0, 1).
        mesh: the ranks; None for a serial layer, with the same masks.
        seed: seed of the run; data-parallel copies of the model should have different seeds.
        layer: number of this layer, different for every layer.
        dimension: the dimension that is split over the columns; the first is split over the rows.

    Raises:
        ConfigError: `p` is outside [0, 1).
    """

    draws: Tensor

    def __init__(self, p: float, mesh: Mesh2D | None, *, seed: int = 0, layer: int = 0, dimension: int = -1) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"p={p}: must lie in [0, 1), the probability of dropping. 0.1 is usual")
        self.p, self.mesh, self.seed, self.layer, self.dimension = p, mesh, seed, layer, dimension
        # A buffer, because a resumed run needs the number of calls for the same masks.
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Map [b / r, ..., h / c] to the same shape; unchanged in evaluation."""
        if not self.training or self.p == 0:
            return x
        # A checkpointed block runs twice: the second run must use the recorded call number.
        call = recorded(self._count_call)
        mask = uniform(_indices(x, self.mesh, self.dimension), self.seed, self.layer, call) >= self.p
        return x * mask.to(x.dtype) / (1 - self.p)

    def _count_call(self) -> Tensor:
        number = self.draws.clone()
        self.draws += 1
        return number

    def extra_repr(self) -> str:
        """Return the probability, the seed and the layer's number."""
        return f"p={self.p}, seed={self.seed}, layer={self.layer}"


def uniform(indices: Tensor, seed: int, layer: int, call: Tensor) -> Tensor:
    """Return a number in [0, 1) for each index, from 24 bits of its hash, which fp32 represents exactly."""
    key = _splitmix64(_splitmix64(_splitmix64(torch.full_like(call, seed)) + layer) + call)
    return (_logical_shift(_splitmix64(indices * _GOLDEN + key.to(indices.device)), 40)).to(torch.float32) / 2**24


def _indices(x: Tensor, mesh: Mesh2D | None, dimension: int) -> Tensor:
    """Return the index of each element in the flattened whole tensor."""
    row, column, rows, columns = (0, 0, 1, 1) if mesh is None else mesh.place
    sizes, starts = list(x.shape), [0] * x.dim()
    sizes[0], starts[0] = sizes[0] * rows, row * x.shape[0]
    sizes[dimension], starts[dimension] = sizes[dimension] * columns, column * x.shape[dimension]
    indices = torch.zeros((), dtype=torch.int64, device=x.device)
    for k, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        index = torch.arange(start, start + x.shape[k], device=x.device)
        indices = indices.unsqueeze(-1) * size + index
    return indices


def _splitmix64(z: Tensor) -> Tensor:
    """Apply SplitMix64's output function; torch's int64 products wrap around, as required."""
    z = z + _GOLDEN
    z = (z ^ _logical_shift(z, 30)) * _FIRST
    z = (z ^ _logical_shift(z, 27)) * _SECOND
    return z ^ _logical_shift(z, 31)


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros; `>>` on signed integers fills with the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
