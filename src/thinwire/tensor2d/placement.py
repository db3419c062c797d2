# SPDX-License-Identifier: Apache-2.0
"""The placement of a tensor: each rank's block and its storage.

A `Placement` describes the tensor of the serial model, so that blocks can be taken from it, put back into it, and read
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
        size: length of this dimension in the whole tensor.
        cut: whether it is split over the rows or the columns of the mesh, or not at all.
        sections: sizes of parts that are split separately (queries, keys and values), so that each column holds a
            share of each; empty is one section.
        padded: length after padding with zeros at the end; 0 is no padding.
    """

    size: int
    cut: Literal["rows", "columns", "none"] = "none"
    sections: tuple[int, ...] = ()
    padded: int = 0

    def length(self, place: Place) -> int:
        """Return the length of one rank's block, including padding."""
        parts = {"rows": place.rows, "columns": place.columns, "none": 1}[self.cut]
        return max(self.size, self.padded) // parts

    def runs(self, place: Place) -> list[Run]:
        """Return the intervals [start, stop) of the whole that a rank holds, in the order of its storage."""
        order = [(0, self.size)]
        if len(self.sections) > 1:
            # The whole, reordered: first the shares of column 0 of every section, then those of column 1. The rows
            # split the same order, so that both layouts of a linear layer give a column the same outputs.
            starts, columns = [0, *accumulate(self.sections)], place.columns
            order = [
                (start + size * j // columns, start + size * (j + 1) // columns)
                for j in range(columns)
                for start, size in zip(starts, self.sections, strict=False)
            ]
        length = self.length(place)
        start = {"rows": place.row, "columns": place.column, "none": 0}[self.cut] * length
        return _within(order, start, start + length)


@dataclass(frozen=True)
class Placement:
    """The block of a whole tensor that each rank holds.

    Args:
        axes: one for each dimension of the whole.
        transposed: whether the block is stored with its two dimensions swapped.
    """

    axes: tuple[Axis, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(axis.size for axis in self.axes)

    @property
    def replicated(self) -> bool:
        """True if the tensor is replicated over the rows (and perhaps split over the columns)."""
        return all(axis.cut != "rows" for axis in self.axes)

    def cut(self, whole: Tensor, place: Place) -> Tensor:
        """Copy a rank's block of `whole`."""
        return self.read(lambda *slices: whole[slices], place, like=whole)

    def read(self, part: Callable[..., Tensor], place: Place, *, like: Tensor) -> Tensor:
        """Read a rank's block from a file or a tensor, slice by slice.

        Args:
            part: returns the part of the whole at one slice per dimension.
            place: the rank's place in the mesh.
            like: a tensor with the block's dtype and device.
        """
        block = like.new_zeros([axis.length(place) for axis in self.axes])
        for here, there in self._pairs(place):
            block[here].copy_(part(*there))
        return block.T.contiguous() if self.transposed else block

    def put_(self, whole: Tensor, block: Tensor, place: Place) -> None:
        """Write a rank's block to its position in `whole`."""
        block = block.T if self.transposed else block
        for here, there in self._pairs(place):
            whole[there].copy_(block[here])

    def _pairs(self, place: Place) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Return rectangles of the block, each with the matching rectangle of the whole."""
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
        """Return the whole tensor, from every rank's block."""
        some = next(iter(blocks.values()))
        whole = torch.zeros(self.shape, dtype=some.dtype, device=some.device)
        for place, block in blocks.items():
            self.put_(whole, block, place)
        return whole


def _within(runs: list[Run], start: int, stop: int) -> list[Run]:
    """Return the part [start, stop) of the concatenation of `runs`, as intervals of the whole."""
    found: list[Run] = []
    position = 0
    for first, last in runs:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            found.append((first + low - position, first + high - position))
        position += last - first
    return found
