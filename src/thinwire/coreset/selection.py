"""`select`: from features to a coreset, on one machine or on many."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.coreset.distributed import Shards
from thinwire.coreset.facility import Goal, Progress
from thinwire.coreset.methods import EXACT, Found, How, Method, Warm, solve
from thinwire.coreset.similarity import Distances, Features, among, centred, checked
from thinwire.coreset.subset import Coreset
from thinwire.errors import ConfigError

Labels: TypeAlias = Tensor | NDArray[np.generic] | Sequence[int]


@dataclass(frozen=True)
class Size:
    """How large the coreset is to be; one of the three.

    Raises:
        ConfigError: none or several are given, or one is out of range.
    """

    budget: int | None
    fraction: float | None
    cover: float | None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            words = ", ".join(f"{name}={value}" for name, value in given.items()) or "no size"
            raise ConfigError(f"{words}: give one of budget, fraction and cover, such as fraction=0.1")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction={self.fraction}: must be above 0 and at most 1; 0.1 is usual")
        if self.cover is not None and not 0 <= self.cover < float("inf"):
            raise ConfigError(f"cover={self.cover}: must be 0 or more, a sum of distances over all points")

    def of(self, n: int) -> int:
        """The budget among n points.

        Raises:
            ConfigError: there are not so many, or it is not positive.
        """
        if self.cover is not None:
            return n
        budget = max(1, round(self.fraction * n)) if self.fraction is not None else self.budget or 0
        if not 1 <= budget <= n:
            raise ConfigError(f"budget={self.budget}: must lie in 1..{n}, for {n} points")
        return budget


def select(
    features: Features | Distances,
    *,
    budget: int | None = None,
    fraction: float | None = None,
    cover: float | None = None,
    labels: Labels | None = None,
    method: Method = "lazy",
    comm: Comm | None = None,
    seed: int = 0,
    warm: Coreset | None = None,
    eps: float | None = None,
    neighbours: int = 32,
    parts: int = 4,
    told: Progress | None = None,
) -> Coreset:
    r"""Choose the points that stand for all, and how many each stands for.

    Minimises $L(S)=\sum_i\min_{j\in S}d_{ij}$ greedily; where $d_{ij}$ bounds how far the gradients of two points are
    apart, L bounds how far the weighted sum of gradients over S is from the sum over all. No n x n matrix is ever held.

    Mirzasoleiman, Bilmes and Leskovec, Coresets for Data-efficient Training of Machine Learning Models, ICML 2020,
    arXiv:1906.01827, Algorithm 1.

    Args:
        features: [n, d], whose Euclidean distances count; or any `Distances`. With `comm`, this rank's rows.
        budget: how many points.
        fraction: how many of all points, in (0, 1], instead of a budget.
        cover: as few points as reach $L(S)\le$ cover, instead of a budget.
        labels: [n]; where given, each class is selected for itself, with its share of the budget.
        method: `lazy` is exact greedy, `naive` the same without its short cuts; `stochastic` looks at samples;
            `sparse` at near neighbours alone, for millions of points; `streaming` at each point once; `greedi` selects
            in parts, then among the parts' picks.
        comm: ranks that hold a shard each; the points are numbered in the order of ranks, and all get the whole result.
        seed: of what `stochastic`, `sparse`, `streaming` and `greedi` draw.
        warm: an earlier `lazy` or `naive` selection. Where the points are still the same its picks are only checked,
            and the selection goes on from there; where they are not it is put aside. The result is the same.
        eps: how far `stochastic` (0.01 unless given) and `streaming` (0.1) may fall short; less is better and slower.
        neighbours: of each point, for `sparse`; more is nearer to exact.
        parts: of `greedi`; with `comm` every rank is one.
        told: called now and then with the share that is done; with labels by several threads.

    Returns:
        The coreset, in greedy order, on the CPU.

    Raises:
        ConfigError: an argument, or the features, cannot be used; says which and what to do.
    """
    how = How(method, seed, (0.1 if method == "streaming" else 0.01) if eps is None else eps, neighbours, parts)
    size = Size(budget, fraction, cover)
    if comm is not None and comm.size > 1:
        shards = Shards(features, _plain(labels), comm)
        goals = _goals(size, shards.sizes, told)
        earlier = _earlier(warm, shards.members, shards.n, how)
        found = [shards.solve(i, goal, how, earlier[i]) for i, goal in enumerate(goals)]
        return _joined(found, shards.members, shards.n, how)
    points = centred(checked(features)) if isinstance(features, (Tensor, np.ndarray)) else features
    n = len(points) if isinstance(points, Tensor) else points.n
    members = _classes(_plain(labels), n)
    goals, earlier = _goals(size, [len(each) for each in members], told), _earlier(warm, members, n, how)

    def one(i: int, threads: int) -> Found:
        return solve(_part(points, members, i), goals[i], how, how.generator(i), earlier[i], threads)

    return _joined(_everyone(one, len(members)), members, n, how)


def _everyone(one: Callable[[int, int], Found], count: int) -> list[Found]:
    """All classes: the threads take a class each where there are several, else share the one."""
    threads = torch.get_num_threads()
    if threads == 1 or count == 1:
        return [one(i, threads) for i in range(count)]
    with ThreadPoolExecutor(threads, thread_name_prefix="thinwire-select") as pool:
        return list(pool.map(lambda i: one(i, 1), range(count)))


def _part(points: Tensor | Distances, members: list[Tensor], i: int) -> Tensor | Distances:
    if len(members) == 1:
        return points
    return points[members[i].to(points.device)] if isinstance(points, Tensor) else among(points, members[i])


def _plain(labels: Labels | None) -> NDArray[np.generic] | None:
    """Labels as an array.

    Raises:
        ConfigError: not one a point, or one is missing.
    """
    if labels is None:
        return None
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.ndim != 1:
        raise ConfigError(f"labels {list(array.shape)}: need one number for each point, [n]")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        first = int((~np.isfinite(array)).argmax())
        raise ConfigError(f"labels: row {first} has none ({array[first]}); give it one, or leave the row out")
    return array


def _classes(labels: NDArray[np.generic] | None, n: int) -> list[Tensor]:
    """The points of each class, ascending, in the order of labels; without labels all in one."""
    if labels is None:
        return [torch.arange(n)]
    if len(labels) != n:
        raise ConfigError(f"labels [{len(labels)}]: there are {n} points, and each needs one")
    _, codes = np.unique(labels, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    return [torch.from_numpy(part) for part in np.split(order, np.cumsum(np.bincount(codes))[:-1])]


def _goals(size: Size, sizes: list[int], told: Progress | None) -> list[Goal]:
    """Every class's share of the whole."""
    n = sum(sizes)
    budget = size.of(n)
    tellers = _tellers(sizes, told)
    if size.cover is not None:
        return [Goal(own, size.cover * own / n, tell) for own, tell in zip(sizes, tellers, strict=True)]
    given = shares(sizes, budget) if len(sizes) > 1 else [budget]
    return [Goal(own, None, tell) for own, tell in zip(given, tellers, strict=True)]


def _tellers(sizes: list[int], told: Progress | None) -> list[Progress | None]:
    """For each class what tells how much of the whole is done."""
    done = [0.0] * len(sizes)

    def tell(i: int, share: float) -> None:
        done[i] = share
        if told is not None:
            told(sum(map(operator.mul, done, sizes)) / sum(sizes))

    return [None if told is None else partial(tell, i) for i in range(len(sizes))]


def _earlier(warm: Coreset | None, members: list[Tensor], n: int, how: How) -> list[Warm | None]:
    """An earlier selection, class by class, in the class's own numbers."""
    if warm is None or warm.n != n or how.method not in EXACT or warm.method not in EXACT:
        return [None] * len(members)
    parts: list[Warm | None] = []
    for own in members:
        inside = torch.isin(warm.indices, own)
        parts.append(Warm(torch.searchsorted(own, warm.indices[inside]).tolist(), warm.gains[inside].tolist()))
    return parts


def _joined(groups: list[Found], members: list[Tensor], n: int, how: How) -> Coreset:
    """One coreset of all classes."""
    order = interleaved([len(group.indices) for group in groups])
    sizes = [group.sizes.tolist() for group in groups]
    return Coreset(
        indices=torch.tensor([int(members[i][groups[i].indices[place]]) for i, place in order], dtype=torch.int64),
        weights=torch.tensor([sizes[i][place] for i, place in order], dtype=torch.float64),
        gains=torch.tensor([groups[i].gains[place] for i, place in order], dtype=torch.float64),
        cost=sum(group.cost for group in groups),
        n=n,
        method=how.method,
    )


# -- classes -----------------------------------------------------------------------------------------------------------


def shares(sizes: Sequence[int], budget: int) -> list[int]:
    """A budget shared out to classes in proportion to their sizes, by largest remainders.

    The shares sum to the budget; each is at least 1 and at most the class's size. Worked out in whole numbers.

    Args:
        sizes: points of each class, at least 1.
        budget: in all.

    Raises:
        ConfigError: fewer than one for each class, or more than there are points.
    """
    n = sum(sizes)
    if not len(sizes) <= budget <= n:
        raise ConfigError(
            f"budget={budget}: {len(sizes)} classes of {n} points need at least 1 point each and have no more; "
            f"take {len(sizes)} to {n}, or select without labels"
        )
    given = [max(1, size * budget // n) for size in sizes]
    while (over := sum(given) - budget) != 0:
        residual = [(size * budget - n * share, -i) for i, (size, share) in enumerate(zip(sizes, given, strict=True))]
        if over < 0:
            chosen = max(debt for debt, size, share in zip(residual, sizes, given, strict=True) if share < size)
        else:
            chosen = min(debt for debt, share in zip(residual, given, strict=True) if share > 1)
        given[-chosen[1]] += 1 if over < 0 else -1
    return given


def interleaved(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(class, place within it) so that every beginning holds the classes in about the ratio of these sizes."""
    lanes = [[((2 * place + 1) / (2 * size), i, place) for place in range(size)] for i, size in enumerate(sizes)]
    return [(i, place) for _, i, place in heapq.merge(*lanes)]
