"""How training data is dealt out to workers: every example to exactly one of them."""

import math
import re
from collections.abc import Sequence

import numpy as np

from thinwire.errors import ConfigError
from thinwire.tasks.data.base import Census, Indices, Shard, Stream

SPLITS = ("iid", "dirichlet(ALPHA)", "label", "group")
_DIRICHLET = re.compile(r"dirichlet\(\s*([^()\s]+)\s*\)")


def split_shards(census: Census, workers: int, *, split: str, seed: int) -> tuple[Shard, ...]:
    """Deal the examples out: each to exactly one worker, the same deal on every rank.

    `iid` deals at random into equal parts. `dirichlet(alpha)` draws, for each class (or group, where there are no
    classes), the workers' shares from Dirichlet(alpha): small alpha, unlike workers; shards differ in size.
    `label` sorts by class and cuts into equal parts. `group` keeps each group whole and balances the sizes.

    Args:
        census: what is known of each example.
        workers: how many shards.
        split: the rule, one of `SPLITS`.
        seed: of the deal.

    Raises:
        ConfigError: for an unknown split, one that this data does not allow, or too many workers.
    """
    if workers < 1:
        raise ConfigError(f"workers={workers}: data is split across at least 1 worker")
    parts = _deal(census, workers, split, Stream((seed, 0x5B117)))
    _feed(parts, census)
    shards = tuple(Shard(np.sort(part), int(census.weights[part].sum())) for part in parts)
    _check(shards, census, split)
    return shards


def dirichlet_alpha(split: str) -> float | None:
    """The alpha of `dirichlet(alpha)`; None for any other split.

    Raises:
        ConfigError: if alpha is not a positive, finite number.
    """
    found = _DIRICHLET.fullmatch(split.strip())
    if found is None:
        return None
    try:
        alpha = float(found[1])
    except ValueError:
        alpha = math.nan
    if not (math.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"split={split!r}: alpha must be a positive number, as in dirichlet(0.1)")
    return alpha


def _deal(census: Census, workers: int, split: str, stream: Stream) -> list[Indices]:
    order = stream.permutation(len(census))
    alpha = dirichlet_alpha(split)
    if alpha is not None:
        categories = census.labels if census.labels is not None else census.groups
        return _by_dirichlet(_required(categories, split, "classes or groups"), order, workers, alpha, stream)
    if split == "iid":
        return np.array_split(order, workers)
    if split == "label":
        labels = _required(census.labels, split, "classes")
        return np.array_split(order[np.argsort(labels[order], kind="stable")], workers)
    if split == "group":
        return _by_group(_required(census.groups, split, "groups"), census.weights, order, workers)
    raise ConfigError(f"split={split!r}: unknown; use one of {', '.join(SPLITS)}")


def _required(categories: Indices | None, split: str, what: str) -> Indices:
    if categories is None:
        raise ConfigError(f"split={split!r}: this data has no {what}; use split='iid'")
    return categories


def _by_dirichlet(categories: Indices, order: Indices, workers: int, alpha: float, stream: Stream) -> list[Indices]:
    generator = stream.generator()
    parts: list[list[Indices]] = [[] for _ in range(workers)]
    for category in np.unique(categories):
        members = order[categories[order] == category]
        shares = generator.dirichlet(np.full(workers, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _by_group(groups: Indices, weights: Indices, order: Indices, workers: int) -> list[Indices]:
    """The heaviest group first, each to the worker that has least so far; ties in the order of the deal."""
    names, first = np.unique(groups[order], return_index=True)
    if len(names) < workers:
        raise ConfigError(f"split='group': {workers} workers, but only {len(names)} groups; use fewer workers")
    heft = np.bincount(groups, weights=weights)[names]
    owner = np.zeros(int(names.max()) + 1, np.int64)
    loads = np.zeros(workers)
    for index in np.lexsort((first, -heft)):
        lightest = int(loads.argmin())
        owner[names[index]] = lightest
        loads[lightest] += heft[index]
    return [np.flatnonzero(owner[groups] == worker) for worker in range(workers)]


def _feed(parts: list[Indices], census: Census) -> None:
    """Give shards that got too little to train on an example or two from the largest shard.

    A small alpha may leave a worker with nothing at all. Each gift lessens what is lacking, so this ends.
    """
    sizes = [int(census.weights[part].sum()) for part in parts]
    while min(sizes) < census.minimum:
        poor, rich = sizes.index(min(sizes)), sizes.index(max(sizes))
        gift = parts[rich][-1:]
        weight = int(census.weights[gift].sum())
        if sizes[rich] - weight < census.minimum:
            return
        parts[rich], parts[poor] = parts[rich][:-1], np.concatenate([parts[poor], gift])
        sizes[rich], sizes[poor] = sizes[rich] - weight, sizes[poor] + weight


def _check(shards: Sequence[Shard], census: Census, split: str) -> None:
    for rank, shard in enumerate(shards):
        if shard.units < census.minimum:
            raise ConfigError(
                f"workers={len(shards)}, split={split!r}: worker {rank} would hold {shard.units} {census.unit}, "
                f"and it needs at least {census.minimum}; use fewer workers"
            )
