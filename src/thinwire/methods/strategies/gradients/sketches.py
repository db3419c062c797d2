# SPDX-License-Identifier: Apache-2.0
"""Count sketches, the parts of a vector in them, and sparse updates, for `SketchedSGD` and `FetchSGD`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.core.kernels import Flag, cells_at, heavy, is_finite, sketch_, top_k, unsketch
from thinwire.core.kernels.decisions import decide, holds, to_device
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.methods.reduce.leaving import hand_on_sums_
from thinwire.methods.strategies.base import Strategy


@dataclass(frozen=True)
class Table:
    """A count sketch of a vector: every element is added, with a random sign, to one random cell of each row.

    An element's estimate is the median over rows of its cells times its sign. The sum of tables of the same shape,
    length and key is the table of the sum.

    Attributes:
        cells: [rows, columns], fp32.
        length: elements of the vector.
        key: the key of cells and signs.
    """

    cells: Tensor
    length: int
    key: int

    @classmethod
    def of(cls, x: Tensor, shape: Sequence[int], key: int) -> Table:
        """Sketch a vector in a table of this shape."""
        cells = torch.zeros(*shape, dtype=torch.float32, device=x.device)
        # In fp32, like the cells: sums in 16 bits would lose small entries.
        if x.numel():
            sketch_(x.float(), cells, key=key)
        return cls(cells, x.numel(), key)

    def all_reduced(self, r: Replica, dense: Tensor) -> tuple[Table, Tensor]:
        """Sum this table and an uncompressed vector over ranks, in one all-reduce."""
        message = torch.cat([self.cells.view(-1).to(dense.dtype), dense])
        total = r.comm.all_reduce_(message).wait()
        cells, rest = total[: self.cells.numel()], total[self.cells.numel() :]
        return Table(cells.view(self.cells.shape).float(), self.length, self.key), rest

    @property
    def finite(self) -> Flag:
        """Return True if no cell is NaN or infinite."""
        return is_finite(self.cells)

    @property
    def norm(self) -> Tensor:
        """An estimate of the vector's Euclidean norm."""
        return self.cells.square().sum(1).median().sqrt()

    def largest(self, k: int) -> Tensor:
        """Return the indices of the k largest estimates, ascending."""
        # An empty vector has a table without columns.
        return heavy(self.cells, self.length, k, key=self.key) if self.length else self.cells.new_empty(0).long()

    def estimates(self, indices: Tensor) -> Tensor:
        """Estimate these elements."""
        return unsketch(self.cells, indices, self.length, key=self.key)

    def cells_of(self, indices: Tensor) -> Tensor:
        """Return the cells of these elements, as booleans like `cells`."""
        cells, _ = cells_at(self.cells, indices, key=self.key)
        return torch.zeros_like(self.cells, dtype=torch.bool).scatter_(1, cells, True)

    def subtract_(self, indices: Tensor, values: Tensor) -> None:
        """Subtract the sketch of a vector that has these values at these indices, ascending, and zeros elsewhere."""
        if self.cells.is_cuda:
            # On a GPU index_add_ adds in any order, but tables must be equal on all ranks.
            dense = values.new_zeros(self.length).index_put_((indices,), values)
            self.cells.sub_(Table.of(dense, self.cells.shape, self.key).cells)
            return
        cells, signs = cells_at(self.cells, indices, key=self.key)
        gone = torch.zeros_like(self.cells)
        for line, row, sign in zip(gone, cells, signs, strict=True):
            line.index_add_(0, row, sign * values.float())
        self.cells.sub_(gone)


# -- the parts of a vector that are sketched ---------------------------------------------------------------------------


class Split(NamedTuple):
    """The slices of a vector that are sketched, and those that are sent uncompressed.

    Attributes:
        large: the slices of large tensors, which are sketched.
        small: the slices of small tensors.
    """

    large: Sequence[slice]
    small: Sequence[slice]

    @property
    def length(self) -> int:
        """The number of sketched elements."""
        return sum(part.stop - part.start for part in self.large)

    def large_of(self, x: Tensor) -> Tensor:
        """Return the sketched elements as one vector, which is `x` itself if no tensor is small."""
        return torch.cat([x[:0], *(x[part] for part in self.large)]) if self.small else x

    def small_of(self, x: Tensor) -> Tensor:
        """Return the uncompressed elements as one vector."""
        return torch.cat([x[:0], *(x[part] for part in self.small)])

    def positions(self, indices: Tensor) -> Tensor:
        """Return the positions in the vector of these elements of `large_of`."""
        if not self.small or not self.large:
            return indices
        starts, ends = torch.tensor([[p.start, p.stop] for p in self.large], dtype=torch.int64, device="cpu").T
        stops = (ends - starts).cumsum(0)
        stops, shifts = to_device(torch.stack([stops, ends - stops]), indices.device)
        return indices + shifts[torch.bucketize(indices, stops, right=True)]


def largest_of(sums: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest of sums over workers, which are equal on all ranks.

    Raises:
        NonFiniteError: on all ranks, if a sum is not finite.
    """
    if not holds(is_finite(sums)):
        raise NonFiniteError(
            f"some of {sums.numel()} sums over workers are NaN or infinite, although every gradient is finite. Lower "
            "the learning rate, or clip gradients"
        )
    return top_k(sums, k)


def split_of(r: Replica, dense_below: int) -> Split:
    """Split a vector by the sizes of its tensors; adjacent slices are joined."""
    large, small = list[slice](), list[slice]()
    for segment in r.segments:
        slices = small if segment.size < dense_below else large
        start = slices.pop().start if slices and slices[-1].stop == segment.start else segment.start
        slices.append(slice(start, segment.stop))
    return Split(large, small)


# -- sparse updates ----------------------------------------------------------------------------------------------------


class Update(NamedTuple):
    """A sparse update that is equal on all ranks.

    Attributes:
        parts: positions in the replica's vector, and the values to subtract there. Only on a CPU, where repeated
            positions are added in order, may the positions of a part repeat.
        mine: positions at which this worker's residual was sent completely.
        dense: the values of small tensors.
        small: the slices of small tensors.
    """

    parts: list[tuple[Tensor, Tensor]]
    mine: Tensor
    dense: Tensor
    small: Sequence[slice]


@dataclass(frozen=True)
class SketchedUpdates(Strategy):
    """A strategy that applies a sparse update of its own, equal on all ranks, in place of the mean gradient.

    The sums over workers of `r.state["momentum"]` and `r.state["unsent"]` matter, and not each worker's part.
    """

    fraction: Annotated[float, Range("(0, 1]", "0.0003 is usual")] = 0.0003
    columns: Annotated[int, Range("1..", "32 for each updated coordinate is usual")] = 32
    rows: int = 5

    # A field of each subclass, at a place of its own among the arguments.
    lr_in_residual = True

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows % 2 == 0:
            raise ConfigError(f"rows={self.rows}: must be odd, for a median. 5 is usual")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the optimizer is SGD without momentum, because the strategy applies its own."""
        plain = isinstance(optimizer, SGD) and not any(
            group["momentum"] or group["maximize"] for group in optimizer.param_groups
        )
        if optimizer is not None and not plain:
            name = type(self).__name__
            raise ConfigError(
                f"{type(optimizer).__name__} under {name}: it must apply {name}'s update unchanged. Use "
                f"torch.optim.SGD without momentum, and {name}(momentum=0.9)"
            )

    @abstractmethod
    def before_step(self, r: Replica) -> None:
        """Compute the common update, and write it into the gradient."""

    def zeros(self, r: Replica) -> Tensor:
        """Return a vector for sums of many small gradients, in fp32 at least."""
        return torch.zeros_like(r.x, dtype=torch.promote_types(r.x.dtype, torch.float32))

    def share(self, r: Replica) -> Tensor:
        """Return this worker's share of the mean gradient, times the learning rate if residuals contain it."""
        fresh = r.g.to(torch.promote_types(r.g.dtype, torch.float32), copy=True).div_(r.active)
        return fresh.mul_(r.lr) if self.lr_in_residual else fresh

    def write_(self, r: Replica, update: Update) -> Tensor:
        """Write an update into `r.g`, which SGD will apply; returns the positions of `mine` that it will apply.

        Parameters with a learning rate of zero do not change, and their update stays in the residual.
        """
        rate_of_all = r.lr
        known = not isinstance(rate_of_all, Tensor)
        # A number is filled in, since a copy of it would wait for a GPU.
        lr = torch.full((), rate_of_all, dtype=torch.float64, device=r.g.device) if known else rate_of_all.double()

        def at(where: Tensor | slice) -> Tensor:
            return lr[where] if lr.ndim else lr

        def gradients(where: Tensor | slice, values: Tensor) -> Tensor:
            if not self.lr_in_residual:
                return values.to(r.g.dtype)
            # SGD multiplies by the learning rate again.
            rate = at(where).to(values.dtype)
            return torch.where(rate > 0, values / torch.where(rate > 0, rate, 1.0), 0.0).to(r.g.dtype)

        # Parts are added one after the other, because positions may repeat between them.
        for where, values in update.parts:
            r.g.index_add_(0, where, gradients(where, values))
        sizes = [part.stop - part.start for part in update.small]
        for part, values in zip(update.small, update.dense.split(sizes) if sizes else (), strict=True):
            r.g[part] = gradients(part, values)
        mine = update.mine
        if known:
            return mine if rate_of_all > 0 else mine[:0]
        moves = at(mine) > 0
        return decide(moves, lambda: mine[moves.expand_as(mine)], most=mine, least=mine)

    def before_leave(self, r: Replica, leaving: Sequence[int]) -> None:
        """Pass the residual and momentum of leaving workers to neighbors, which preserves their sums."""
        hand_on_sums_(r.comm, r.state, leaving, _is_share, scale=1)

    def regroup(self, r: Replica, before: int) -> None:
        """Clear the residual and momentum of a joining worker: as copies, they would be applied twice."""
        for name in filter(_is_share, () if before else r.state):
            r.state[name].zero_()

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
        """Give each new worker an equal share of the residuals and momenta; tables are equal on all workers."""
        shares: dict[str, Tensor] = {}
        for name, first in states[0].items():
            total = torch.stack([state[name].double() for state in states]).sum(0) if _is_share(name) else None
            shares[name] = first if total is None else (total / size).to(first.dtype)
        return [{name: x.clone() for name, x in shares.items()} for _ in range(size)]


def _is_share(name: str) -> bool:
    return name.rpartition("/")[2] in ("momentum", "unsent")
