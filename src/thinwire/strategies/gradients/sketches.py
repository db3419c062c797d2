"""What methods share that move a few coordinates at a time: the table, what is sketched, and how plain SGD moves it.

In a run without data (on the meta device, as `explain` uses it) tables have a shape and no values: nothing is hashed,
and the first coordinates stand for the largest ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.errors import ConfigError
from thinwire.kernels import heavy, sketch_, top_k, unsketch
from thinwire.replica.replica import Replica


@dataclass(frozen=True)
class Table:
    """A count sketch of a vector.

    Tables of the same shape, length and key add up: the sum of tables is the table of the sum.

    Attributes:
        cells: [rows, columns], fp32.
        length: elements of the vector.
        key: of the hashes.
    """

    cells: Tensor
    length: int
    key: int

    @classmethod
    def of(cls, x: Tensor, shape: Sequence[int], key: int) -> Table:
        """The sketch of a vector in so many rows and columns."""
        cells = torch.zeros(*shape, dtype=torch.float32, device=x.device)
        if not x.is_meta and x.numel():
            sketch_(x.float(), cells, key=key)
        return cls(cells, x.numel(), key)

    def all_reduced(self, r: Replica, dense: Tensor) -> tuple[Table, Tensor]:
        """The sum of this table over ranks, and that of a vector that travels with it as it is: one message."""
        message = torch.cat([self.cells.view(-1).to(dense.dtype), dense])
        total = r.comm.all_reduce_(message).wait()
        cells, rest = total[: self.cells.numel()], total[self.cells.numel() :]
        return Table(cells.view(self.cells.shape).float(), self.length, self.key), rest

    @property
    def finite(self) -> bool:
        """Whether no cell is NaN or infinite."""
        return finite(self.cells)

    @property
    def norm(self) -> Tensor:
        """An estimate of the vector's Euclidean norm."""
        return self.cells.square().sum(1).median().sqrt()

    def heaviest(self, k: int) -> Tensor:
        """The indices of the k largest estimates, in order."""
        k = min(k, self.length)
        if self.cells.is_meta or not k:
            return torch.arange(k, device=self.cells.device)
        return heavy(self.cells, self.length, k, key=self.key)

    def estimates(self, indices: Tensor) -> Tensor:
        """Estimates of these elements."""
        if self.cells.is_meta:
            return torch.empty(indices.numel(), device="meta")
        return unsketch(self.cells, indices, self.length, key=self.key)

    def touched_by(self, indices: Tensor) -> Tensor:
        """Which cells these elements fall into, as booleans like `cells`."""
        marks = distinct_marks(self.length, indices)
        return Table.of(marks, self.cells.shape, self.key).cells != 0


def distinct_marks(length: int, indices: Tensor) -> Tensor:
    """A vector of zeros, but different numbers between 1 and 2 at these indices: no two of them cancel in a cell."""
    marks = 1 + torch.arange(indices.numel(), device=indices.device) / max(1, indices.numel())
    return torch.zeros(length, device=indices.device).index_put_((indices,), marks)


def largest_of(x: Tensor, k: int) -> Tensor:
    """The indices of the k largest elements, in order."""
    k = min(k, x.numel())
    return torch.arange(k, device=x.device) if x.is_meta or not k else top_k(x, k)


def finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return x.is_meta or bool(x.isfinite().all())


# -- which part of a vector is sketched --------------------------------------------------------------------------------


class Cut(NamedTuple):
    """Which stretches of a vector are sketched, and which travel whole.

    Attributes:
        large: stretches of large tensors, which are sketched.
        small: stretches of small ones.
    """

    large: Sequence[slice]
    small: Sequence[slice]

    @property
    def length(self) -> int:
        """Elements that are sketched."""
        return sum(part.stop - part.start for part in self.large)

    def large_of(self, x: Tensor) -> Tensor:
        """What is sketched, end to end; the vector itself where that is all of it."""
        return torch.cat([x[:0], *(x[part] for part in self.large)]) if self.small else x

    def small_of(self, x: Tensor) -> Tensor:
        """What travels whole, end to end."""
        return torch.cat([x[:0], *(x[part] for part in self.small)])

    def places(self, indices: Tensor) -> Tensor:
        """Where elements of `large_of` lie in the vector."""
        if not self.small or not self.large:
            return indices
        lengths = torch.tensor([part.stop - part.start for part in self.large])
        stops = lengths.cumsum(0)
        shifts = torch.tensor([part.start for part in self.large]) - (stops - lengths)
        return indices + shifts.to(indices.device)[torch.bucketize(indices, stops.to(indices.device), right=True)]


def cut_of(r: Replica, dense_below: int) -> Cut:
    """Neighbours on the same side are one stretch; where tensors are not known, as in a dry run, all is sketched."""
    large, small = list[slice](), list[slice]()
    for segment in r.moments.segments:
        stretches = small if segment.size < dense_below else large
        start = stretches.pop().start if stretches and stretches[-1].stop == segment.start else segment.start
        stretches.append(slice(start, segment.stop))
    return Cut(large, small) if large or small else Cut([slice(0, r.x.numel())], [])


# -- what workers have agreed to move ----------------------------------------------------------------------------------


class Move(NamedTuple):
    """What all workers have agreed to move.

    Attributes:
        parts: places in the replica's vector, and how far to move there; places of one part are all different, but
            on a CPU, where values in one place are added in order.
        mine: places of which this worker has now sent all that it had.
        dense: how far to move the small tensors.
        small: where these lie.
    """

    parts: list[tuple[Tensor, Tensor]]
    mine: Tensor
    dense: Tensor
    small: Sequence[slice]


def fresh_of(r: Replica, inside: bool) -> Tensor:
    """This worker's share of the mean gradient, in steps of the parameters where the learning rate is `inside`."""
    fresh = r.g.to(torch.promote_types(r.g.dtype, torch.float32), copy=True).div_(r.active)
    return fresh.mul_(r.lr) if inside else fresh


def move_(r: Replica, move: Move, *, inside: bool) -> Tensor:
    """Write into `r.g` what plain SGD is to move; returns the places of `mine` that it does move.

    Where the learning rate is zero nothing moves, and what should have moved there stays in the residual.
    """
    lr = torch.as_tensor(r.lr, dtype=torch.float64, device=r.g.device)

    def at(where: Tensor | slice) -> Tensor:
        return lr[where] if lr.ndim else lr

    def steps(where: Tensor | slice, values: Tensor) -> Tensor:
        if not inside:
            return values.to(r.g.dtype)
        rate = at(where).to(values.dtype)
        return torch.where(rate > 0, values / torch.where(rate > 0, rate, 1.0), 0.0).to(r.g.dtype)

    for where, values in move.parts:
        r.g.index_add_(0, where, steps(where, values))
    sizes = [part.stop - part.start for part in move.small]
    for part, values in zip(move.small, move.dense.split(sizes) if sizes else (), strict=True):
        r.g[part] = steps(part, values)
    if r.x.is_meta:
        return move.mine
    return move.mine[(at(move.mine) > 0).expand_as(move.mine)]


# -- recipes and states ------------------------------------------------------------------------------------------------


def check_table(fraction: float, columns: int, rows: int) -> None:
    """Refuse tables that cannot be.

    Raises:
        ConfigError: with the value, the rule and the fix.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction={fraction}: must lie in (0, 1]; 0.0003 is usual")
    if columns < 1:
        raise ConfigError(f"columns={columns}: at least 1 for each coordinate that is moved; 32 is usual")
    if rows < 1 or rows % 2 == 0:
        raise ConfigError(
            f"rows={rows}: an estimate is the median of the rows, so their number must be odd; 5 is usual"
        )


def check_plain(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that does more than step along what it is given.

    Raises:
        ConfigError: with the fix.
    """
    plain = isinstance(optimizer, SGD) and not any(
        group["momentum"] or group["maximize"] for group in optimizer.param_groups
    )
    if not plain:
        raise ConfigError(
            f"{type(optimizer).__name__} under {name}: the momentum is {name}'s own, and so is what is moved; use "
            f"torch.optim.SGD without momentum, and {name}(momentum=0.9)"
        )


def resize_unsent(states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """The states of another number of workers, which together have the same residual and momentum.

    Args:
        states: of all workers under `SketchedSGD` or `FetchSGD`, as in their checkpoints.
        size: of the new world; each of its workers gets an equal share. Tables that all share stay as they are.
    """
    if not states or size < 1:
        raise ConfigError(f"{len(states)} states for {size} workers: both must be at least 1")
    shares: dict[str, Tensor] = {}
    for name, first in states[0].items():
        if name.rpartition("/")[2] in ("momentum", "unsent"):
            total = torch.stack([state[name].double() for state in states]).sum(0)
            shares[name] = (total / size).to(first.dtype)
        else:
            shares[name] = first
    return [{name: x.clone() for name, x in shares.items()} for _ in range(size)]
