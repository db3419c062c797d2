"""Dropout that does not depend on the mesh: each element's fate is a function of its place in the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.tape import kept

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
_FIRST = -0x40A7B892E31B1A47
_SECOND = -0x6B2FB644ECCEEE15


class Dropout2D(nn.Module):
    """Zero each element with probability `p` and scale the others by 1 / (1 - p).

    The draw for an element is a hash of the seed, the layer, how often it has run, and the element's place in the whole
    tensor. So blocks have unrelated masks, and any mesh the same ones, which ranks that hold copies agree on.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, for the hash.

    Args:
        p: probability of zero, in [0, 1).
        mesh: the ranks; None is a serial layer, with the same masks.
        seed: of the run; replicas that see different data should have different ones.
        layer: a number of its own for each layer.
        dimension: the one that columns cut; rows cut the first.

    Raises:
        ConfigError: a probability outside of its range.
    """

    draws: Tensor

    def __init__(self, p: float, mesh: Mesh2D | None, *, seed: int = 0, layer: int = 0, dimension: int = -1) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"p={p}: the probability of dropping must lie in [0, 1); 0.1 is usual")
        self.p, self.mesh, self.seed, self.layer, self.dimension = p, mesh, seed, layer, dimension
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """[b / r, ..., h / c] to the same; unchanged in evaluation."""
        if not self.training or self.p == 0:
            return x
        draw = kept(self._next)
        mask = uniform(_places(x, self.mesh, self.dimension), self.seed, self.layer, draw) >= self.p
        return x * mask.to(x.dtype) / (1 - self.p)

    def _next(self) -> Tensor:
        number = self.draws.clone()
        self.draws += 1
        return number

    def extra_repr(self) -> str:
        """The probability and the key."""
        return f"p={self.p}, seed={self.seed}, layer={self.layer}"


def uniform(places: Tensor, seed: int, layer: int, draw: Tensor) -> Tensor:
    """A number in [0, 1) for each place, from 24 bits of its hash."""
    key = _mixed(_mixed(_mixed(torch.full_like(draw, seed)) + layer) + draw)
    return (_shifted(_mixed(places * _GOLDEN + key.to(places.device)), 40)).to(torch.float32) / 2**24


def _places(x: Tensor, mesh: Mesh2D | None, dimension: int) -> Tensor:
    """The number of each element in the whole tensor, in row-major order."""
    row, column, rows, columns = (0, 0, 1, 1) if mesh is None else mesh.place
    sizes, starts = list(x.shape), [0] * x.dim()
    sizes[0], starts[0] = sizes[0] * rows, row * x.shape[0]
    sizes[dimension], starts[dimension] = sizes[dimension] * columns, column * x.shape[dimension]
    places = torch.zeros((), dtype=torch.int64, device=x.device)
    for k, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        index = torch.arange(start, start + x.shape[k], device=x.device)
        places = places.unsqueeze(-1) * size + index
    return places


def _mixed(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64; products wrap around."""
    z = z + _GOLDEN
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings zeros, which `>>` on signed numbers does not."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
