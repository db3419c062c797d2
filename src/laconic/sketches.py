"""What methods share that move a few coordinates at a time: who says what, how plain SGD moves it, and sketches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from laconic.errors import ConfigError
from laconic.kernels import heavy, sketch_, top_k, unsketch
from laconic.replica import Replica


class Said(NamedTuple):
    """What all workers have agreed to move.

    Attributes:
        parts: places in the replica's vector, and how far to move there; places of one part are all different, but
            on a CPU, where what meets is added in order.
        mine: places of which this worker has nothing more to say.
        dense: how far to move the small tensors.
        small: where these lie.
    """

    parts: list[tuple[Tensor, Tensor]]
    mine: Tensor
    dense: Tensor
    small: Sequence[slice]


class Cut(NamedTuple):
    """Which stretches of a vector are sketched, and which travel whole.

    Attributes:
        loud: stretches of large tensors.
        small: stretches of small ones.
    """

    loud: Sequence[slice]
    small: Sequence[slice]

    @property
    def length(self) -> int:
        """Elements that are sketched."""
        return sum(part.stop - part.start for part in self.loud)

    def loud_of(self, x: Tensor) -> Tensor:
        """What is sketched, end to end; the vector itself where that is all of it."""
        return torch.cat([x[:0], *(x[part] for part in self.loud)]) if self.small else x

    def small_of(self, x: Tensor) -> Tensor:
        """What travels whole, end to end."""
        return torch.cat([x[:0], *(x[part] for part in self.small)])

    def places(self, indices: Tensor) -> Tensor:
        """Where elements of `loud_of` lie in the vector."""
        if not self.small or not self.loud:
            return indices
        lengths = torch.tensor([part.stop - part.start for part in self.loud])
        stops = lengths.cumsum(0)
        shifts = torch.tensor([part.start for part in self.loud]) - (stops - lengths)
        return indices + shifts.to(indices.device)[torch.bucketize(indices, stops.to(indices.device), right=True)]


def cut_of(r: Replica, dense_below: int) -> Cut:
    """Neighbours of a kind are one stretch; where tensors are not known, as in a dry run, all is sketched."""
    loud, small = list[slice](), list[slice]()
    for segment in r.moments.segments:
        stretches = small if segment.size < dense_below else loud
        start = stretches.pop().start if stretches and stretches[-1].stop == segment.start else segment.start
        stretches.append(slice(start, segment.stop))
    return Cut(loud, small) if loud or small else Cut([slice(0, r.x.numel())], [])


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


def fresh_of(r: Replica, inside: bool) -> Tensor:
    """This worker's share of the mean gradient, in steps of the parameters where the learning rate is `inside`."""
    fresh = r.g.to(torch.promote_types(r.g.dtype, torch.float32), copy=True).div_(r.active)
    return fresh.mul_(r.lr) if inside else fresh


def move_(r: Replica, said: Said, *, inside: bool) -> Tensor:
    """Let plain SGD move what was agreed on; returns the places of `mine` that it does move.

    Where the learning rate is nothing so is the step, and what should have moved there stays unsaid.
    """
    lr = torch.as_tensor(r.lr, dtype=torch.float64, device=r.g.device)

    def at(where: Tensor | slice) -> Tensor:
        return lr[where] if lr.ndim else lr

    def steps(where: Tensor | slice, values: Tensor) -> Tensor:
        if not inside:
            return values.to(r.g.dtype)
        rate = at(where).to(values.dtype)
        return torch.where(rate > 0, values / torch.where(rate > 0, rate, 1.0), 0.0).to(r.g.dtype)

    for where, values in said.parts:
        r.g.index_add_(0, where, steps(where, values))
    sizes = [part.stop - part.start for part in said.small]
    for part, values in zip(said.small, said.dense.split(sizes) if sizes else (), strict=True):
        r.g[part] = steps(part, values)
    if r.x.is_meta:
        return said.mine
    return said.mine[(at(said.mine) > 0).expand_as(said.mine)]


# -- sketches, which a run without data goes through too ---------------------------------------------------------------


def summed_sketch(r: Replica, loud: Tensor, dense: Tensor, shape: tuple[int, int], key: int) -> tuple[Tensor, Tensor]:
    """The sum over ranks of the sketch of one vector, and of another as it is: one message."""
    rows, columns = shape
    table = torch.zeros(rows, columns, dtype=torch.float32, device=loud.device)
    message = torch.cat([sketch_like(loud, table, key).view(-1).to(loud.dtype), dense])
    total = r.comm.sum_(message).wait()
    return total[: rows * columns].view(rows, columns).float(), total[rows * columns :]


def sketch_like(x: Tensor, like: Tensor, key: int) -> Tensor:
    """The sketch of a vector, in a table of that shape."""
    table = torch.zeros_like(like)
    if not x.is_meta and x.numel():
        sketch_(x.float(), table, key=key)
    return table


def heaviest(table: Tensor, n: int, k: int, key: int) -> Tensor:
    """The places of the largest estimates, in order."""
    k = min(k, n)
    return torch.arange(k, device=table.device) if table.is_meta or not k else heavy(table, n, k, key=key)


def estimated(table: Tensor, indices: Tensor, n: int, key: int) -> Tensor:
    """Estimates of these elements of a vector of n."""
    if table.is_meta:
        return torch.empty(indices.numel(), device="meta")
    return unsketch(table, indices, n, key=key)


def largest_of(x: Tensor, k: int) -> Tensor:
    """The places of the largest elements, in order."""
    k = min(k, x.numel())
    return torch.arange(k, device=x.device) if x.is_meta or not k else top_k(x, k)


def finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return x.is_meta or bool(x.isfinite().all())


def marked(like: Tensor, where: Tensor) -> Tensor:
    """Nothing but different numbers between 1 and 2 in these places, so that no two of them cancel in a cell."""
    marks = 1 + torch.arange(where.numel(), device=like.device) / max(1, where.numel())
    return torch.zeros_like(like, dtype=torch.float32).index_put_((where,), marks)


def resize_unsent(states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """The states of another number of workers, which together have as much unsaid, and as much momentum.

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
