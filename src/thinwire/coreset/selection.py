# SPDX-License-Identifier: Apache-2.0
"""`select`: a coreset from features, on one process or on several."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.validation import check_number, check_ranges
from thinwire.coreset.distributed import Shards
from thinwire.coreset.facility import Goal, Progress
from thinwire.coreset.methods import ClassSelection, Method, MethodSettings, solve
from thinwire.coreset.similarity import Distances, Features, among, centred, checked
from thinwire.coreset.subset import Coreset
from thinwire.errors import ConfigError

Labels: TypeAlias = Tensor | NDArray[np.generic] | Sequence[int]


@dataclass(frozen=True)
class Size:
    """The size of the coreset, in one of three forms.

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
        for name, value in given.items():
            check_number(name, value, whole=name == "budget")
        check_ranges(self, fraction=("(0, 1]", "0.1 is usual"))
        if self.cover is not None and not 0 <= self.cover < float("inf"):
            raise ConfigError(f"cover={self.cover}: must be 0 or more, a sum of distances over all points")

    def of(self, n: int) -> int:
        """Return the budget among n points.

        Raises:
            ConfigError: it is not positive, or there are fewer points.
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
    neighbours: int = 32,
    on_progress: Progress | None = None,
) -> Coreset:
    r"""Choose points that represent all, with the number of points that each represents.

    Minimises $L(S)=\sum_i\min_{j\in S}d_{ij}$ greedily. Where $d_{ij}$ bounds the distance between the gradients of two
    points, L bounds the distance of the weighted sum of gradients over S from the sum over all. No n x n matrix is
    stored.

    Mirzasoleiman, Bilmes and Leskovec, Coresets for Data-efficient Training of Machine Learning Models, ICML 2020,
    arXiv:1906.01827, Algorithm 1.

    Example:
        >>> points = torch.tensor([[0.0], [0.1], [0.2], [9.0], [9.1]])
        >>> coreset = select(points, budget=2)
        >>> coreset.indices.tolist(), coreset.weights.tolist()
        ([2, 3], [3.0, 2.0])

    Args:
        features: [n, d], whose Euclidean distances count; or any `Distances`. With `comm`, this rank's rows. A sparse
            matrix of SciPy or torch is expanded, and needs the memory of a dense one.
        budget: number of points.
        fraction: of all points, in (0, 1], instead of a budget.
        cover: as few points as reach $L(S)\le$ cover, instead of a budget.
        labels: [n]; where given, each class is selected separately, with its share of the budget.
        method: `lazy` is exact greedy, `naive` the same without bounds; `sparse` evaluates only near neighbours, for
            millions of points.
        comm: ranks that hold a shard each; the points are numbered in the order of ranks, and all get the whole result.
        seed: of the random draws of `sparse`.
        neighbours: of each point, for `sparse`; more is nearer to exact.
        on_progress: called repeatedly with the share that is done; with labels by several threads.

    Returns:
        The coreset, in greedy order, on the CPU.

    Raises:
        ConfigError: an argument or the features are invalid, or a distance is NaN, infinite or negative.
    """
    settings = MethodSettings(method, seed, neighbours)
    size = Size(budget, fraction, cover)
    if comm is not None and comm.size > 1:
        shards = Shards(features, lambda: _plain(labels), comm)
        goals = _goals(size, shards.sizes, on_progress)
        found = [shards.solve(i, goal, settings) for i, goal in enumerate(goals)]
        return _joined(found, shards.members, shards.n, settings)
    points = features if isinstance(features, Distances) else centred(checked(features))
    n = len(points) if isinstance(points, Tensor) else points.n
    members = members_of(labels, n)
    goals = _goals(size, [len(each) for each in members], on_progress)

    def one(i: int, threads: int) -> ClassSelection:
        part = among(points, members[i]) if len(members) > 1 else points
        return solve(part, goals[i], settings, settings.generator(i), threads)

    threads, count = torch.get_num_threads(), len(members)
    if threads == 1 or count == 1:
        return _joined([one(i, threads) for i in range(count)], members, n, settings)
    # One class per thread: classes are independent, so that this scales better than threads within a class.
    with ThreadPoolExecutor(threads, thread_name_prefix="thinwire-select") as pool:
        return _joined(list(pool.map(lambda i: one(i, 1), range(count))), members, n, settings)


def _plain(labels: Labels | None) -> NDArray[np.generic] | None:
    """Labels as an array.

    Raises:
        ConfigError: not one for each point, one is missing, or they are of several types.
    """
    if labels is None:
        return None
    try:
        array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        if array.dtype.kind == "O":
            np.unique(array)
    except (TypeError, ValueError):
        raise ConfigError("labels: need one number or one text for each point, [n], all of one type") from None
    if array.ndim != 1:
        raise ConfigError(f"labels {list(array.shape)}: need one number for each point, [n]")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        first = int((~np.isfinite(array)).argmax())
        raise ConfigError(f"labels: row {first} has none ({array[first]}). Add one, or leave the row out")
    return array


def classes_of(labels: Labels, n: int) -> NDArray[np.intp]:
    """Return each point's class, numbered from 0 in the order of labels.

    Args:
        labels: one for each point: numbers or texts.
        n: the number of points.

    Raises:
        ConfigError: not one for each point, one is missing, or they are of several types.
    """
    array = _plain(labels)
    assert array is not None
    if len(array) != n:
        raise ConfigError(f"labels [{len(array)}]: there are {n} points, and each needs one")
    return np.unique(array, return_inverse=True)[1]


def members_of(labels: Labels | None, n: int) -> list[Tensor]:
    """Return the points of each class, ascending, in the order of labels; without labels all in one."""
    if labels is None:
        return [torch.arange(n, device="cpu")]
    codes = classes_of(labels, n)
    order = np.argsort(codes, kind="stable")
    return [torch.from_numpy(part) for part in np.split(order, np.cumsum(np.bincount(codes))[:-1])]


def _goals(size: Size, sizes: list[int], on_progress: Progress | None) -> list[Goal]:
    """Return the goal of every class: its share of the budget or of the cost."""
    n = sum(sizes)
    budget = size.of(n)
    callbacks = _class_callbacks(sizes, on_progress)
    if size.cover is not None:
        return [Goal(own, size.cover * own / n, call) for own, call in zip(sizes, callbacks, strict=True)]
    given = proportional_budgets(sizes, budget) if len(sizes) > 1 else [budget]
    return [Goal(own, None, call) for own, call in zip(given, callbacks, strict=True)]


def _class_callbacks(sizes: list[int], on_progress: Progress | None) -> list[Progress | None]:
    """Return for each class a callback that turns its progress into that of the whole selection."""
    done = [0.0] * len(sizes)

    def report(i: int, share: float) -> None:
        done[i] = share
        if on_progress is not None:
            on_progress(sum(map(operator.mul, done, sizes)) / sum(sizes))

    return [None if on_progress is None else partial(report, i) for i in range(len(sizes))]


def _joined(groups: list[ClassSelection], members: list[Tensor], n: int, settings: MethodSettings) -> Coreset:
    """Join the selections of all classes."""
    # Interleaved, so that every prefix is a coreset of all classes.
    order = interleave([len(group.indices) for group in groups])
    sizes = [group.sizes.tolist() for group in groups]
    return Coreset(
        indices=torch.tensor(
            [int(members[i][groups[i].indices[place]]) for i, place in order], dtype=torch.int64, device="cpu"
        ),
        weights=torch.tensor([sizes[i][place] for i, place in order], dtype=torch.float64, device="cpu"),
        gains=torch.tensor([groups[i].gains[place] for i, place in order], dtype=torch.float64, device="cpu"),
        cost=sum(group.cost for group in groups),
        n=n,
        method=settings.method,
    )


# -- classes -----------------------------------------------------------------------------------------------------------


def proportional_budgets(sizes: Sequence[int], budget: int) -> list[int]:
    """Divide a budget among classes in proportion to their sizes, by largest remainders.

    The parts sum to the budget; each is at least 1 and at most the class's size. Computed in whole numbers.

    Args:
        sizes: points of each class, at least 1.
        budget: in all.

    Raises:
        ConfigError: less than one for each class, or more than there are points.
    """
    n = sum(sizes)
    if not len(sizes) <= budget <= n:
        raise ConfigError(
            f"budget={budget}: {len(sizes)} classes of {n} points need at least 1 point each and at most all. "
            f"Take {len(sizes)} to {n}, or select without labels"
        )
    given = [max(1, size * budget // n) for size in sizes]
    while (over := sum(given) - budget) != 0:
        remainders = [(size * budget - n * share, -i) for i, (size, share) in enumerate(zip(sizes, given, strict=True))]
        if over < 0:
            chosen = max(pair for pair, size, share in zip(remainders, sizes, given, strict=True) if share < size)
        else:
            chosen = min(pair for pair, share in zip(remainders, given, strict=True) if share > 1)
        given[-chosen[1]] += 1 if over < 0 else -1
    return given


def interleave(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(class, position within it), ordered so that every prefix has the classes in about the ratio of their sizes."""
    queues = [[((2 * place + 1) / (2 * size), i, place) for place in range(size)] for i, size in enumerate(sizes)]
    return [(i, place) for _, i, place in heapq.merge(*queues)]
