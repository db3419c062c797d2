"""Which part of a whole tensor a rank holds, and how it lies there.

A `Placement` speaks of the tensor as the serial model has it, so that parts can be cut from it, joined to it, and read
from a file without reading the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from thinwire.tensor2d.mesh import Place

Run = tuple[int, int]


@dataclass(frozen=True)
class Axis:
    """One dimension of a whole tensor.

    Args:
        size: elements of the whole.
        cut: whether rows or columns of the mesh hold a part each, or everyone holds all.
        sections: sizes of parts that are cut one by one, so that each column holds a share of each (queries, keys and
            values, say); empty is one section.
        padded: elements after padding with zeros at the end, so that it can be cut; 0 is none.
    """

    size: int
    cut: Literal["rows", "columns", "none"] = "none"
    sections: tuple[int, ...] = ()
    padded: int = 0

    def length(self, place: Place) -> int:
        """Elements that one rank holds, padding included."""
        parts = {"rows": place.rows, "columns": place.columns, "none": 1}[self.cut]
        return max(self.size, self.padded) // parts

    def runs(self, place: Place) -> list[Run]:
        """The stretches [start, stop) of the whole that a rank holds, in the order in which it holds them."""
        length = self.length(place)
        start = {"rows": place.row, "columns": place.column, "none": 0}[self.cut] * length
        return _within(self._order(place.columns), start, start + length)

    def _order(self, columns: int) -> list[Run]:
        if len(self.sections) < 2:
            return [(0, self.size)]
        starts = [0, *accumulate(self.sections)]
        return [
            (start + size * j // columns, start + size * (j + 1) // columns)
            for j in range(columns)
            for start, size in zip(starts, self.sections, strict=False)
        ]


@dataclass(frozen=True)
class Placement:
    """How a rank's block comes from a whole tensor.

    Args:
        axes: one for each dimension of the whole.
        transposed: the block is stored with its two dimensions exchanged.
    """

    axes: tuple[Axis, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return tuple(axis.size for axis in self.axes)

    @property
    def replicated(self) -> bool:
        """Whether all rows hold the same, each column its part."""
        return all(axis.cut != "rows" for axis in self.axes)

    def block_shape(self, place: Place) -> tuple[int, ...]:
        """The shape in which a rank stores its block."""
        lengths = tuple(axis.length(place) for axis in self.axes)
        return lengths[::-1] if self.transposed else lengths

    def cut(self, whole: Tensor, place: Place) -> Tensor:
        """A rank's block of `whole`, in memory of its own."""
        return self.read(lambda *slices: whole[slices], place, like=whole)

    def read(self, part: Callable[..., Tensor], place: Place, *, like: Tensor) -> Tensor:
        """A rank's block from something that can be sliced.

        Args:
            part: of one slice for each dimension, such as a safetensors file's.
            place: of the rank.
            like: a tensor of the dtype and device of the block.
        """
        block = like.new_zeros([axis.length(place) for axis in self.axes])
        for here, there in self._pairs(place):
            block[here].copy_(part(*there))
        return block.T.contiguous() if self.transposed else block

    def put_(self, whole: Tensor, block: Tensor, place: Place) -> None:
        """Write a rank's block to where it belongs in `whole`."""
        block = block.T if self.transposed else block
        for here, there in self._pairs(place):
            whole[there].copy_(block[here])

    def _pairs(self, place: Place) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Rectangles of the block, each with its rectangle of the whole."""
        pairs: list[tuple[tuple[slice, ...], tuple[slice, ...]]] = [((), ())]
        for axis in self.axes:
            runs = axis.runs(place)
            ends = list(accumulate(stop - start for start, stop in runs))
            steps = [
                (slice(end - (stop - start), end), slice(start, stop))
                for (start, stop), end in zip(runs, ends, strict=True)
            ]
            pairs = [((*here, a), (*there, b)) for here, there in pairs for a, b in steps]
        return pairs

    def join(self, blocks: dict[Place, Tensor]) -> Tensor:
        """The whole tensor from every rank's block."""
        some = next(iter(blocks.values()))
        whole = torch.zeros(self.shape, dtype=some.dtype, device=some.device)
        for place, block in blocks.items():
            self.put_(whole, block, place)
        return whole


def _within(runs: list[Run], start: int, stop: int) -> list[Run]:
    """Those parts of runs laid end to end that lie in [start, stop)."""
    found: list[Run] = []
    position = 0
    for first, last in runs:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            found.append((first + low - position, first + high - position))
        position += last - first
    return found
