# SPDX-License-Identifier: Apache-2.0
"""Splits of the training data among workers: every example goes to exactly one of them."""

import math
import re

import numpy as np

from thinwire.errors import ConfigError
from thinwire.lab.tasks.data.base import ExampleMetadata, Indices, Shard, Stream

SPLITS = ("iid", "dirichlet(ALPHA)", "label", "group")
_DIRICHLET = re.compile(r"dirichlet\(\s*([^()\s]+)\s*\)")


def split_shards(metadata: ExampleMetadata, workers: int, *, split: str, seed: int) -> tuple[Shard, ...]:
    """Split the examples: each goes to exactly one worker, and every rank gets the same split.

    `iid` splits at random into equal parts. `dirichlet(alpha)` draws each worker's fraction of each class (or group,
    if there are no classes) from Dirichlet(alpha): with a small alpha workers have different classes, and shards differ
    in size. `label` sorts by class and cuts into equal parts. `group` keeps each group on one worker and balances the
    sizes.

    Args:
        metadata: the properties of the examples.
        workers: how many shards.
        split: the rule, one of `SPLITS`.
        seed: random seed.

    Raises:
        ConfigError: for an unknown split, one that this data does not allow, or too many workers.

    Example:
        >>> examples = ExampleMetadata(np.ones(6, np.int64), minimum=1, labels=np.array([0, 1, 2, 0, 1, 2]))
        >>> [shard.indices.tolist() for shard in split_shards(examples, 3, split="label", seed=0)]
        [[0, 3], [1, 4], [2, 5]]
    """
    if workers < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    parts = _parts(metadata, workers, split, Stream((seed, 0x5B117)))
    _fill_small_parts(parts, metadata)
    shards = tuple(Shard(np.sort(part), int(metadata.weights[part].sum())) for part in parts)
    for rank, shard in enumerate(shards):
        if shard.units < metadata.minimum:
            raise ConfigError(
                f"workers={len(shards)}, split={split!r}: worker {rank} would hold {shard.units} {metadata.unit}, "
                f"and it needs at least {metadata.minimum}. Use fewer workers"
            )
    return shards


def dirichlet_alpha(split: str) -> float | None:
    """Return the alpha of `dirichlet(alpha)`; None for any other split.

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


def _parts(metadata: ExampleMetadata, workers: int, split: str, stream: Stream) -> list[Indices]:
    order = stream.permutation(len(metadata))
    alpha = dirichlet_alpha(split)
    if alpha is not None:
        categories = metadata.labels if metadata.labels is not None else metadata.groups
        return _by_dirichlet(_required(categories, split, "classes or groups"), order, workers, alpha, stream)
    if split == "iid":
        return np.array_split(order, workers)
    if split == "label":
        labels = _required(metadata.labels, split, "classes")
        # Within a class, in random order.
        return np.array_split(order[np.argsort(labels[order], kind="stable")], workers)
    if split == "group":
        return _by_group(_required(metadata.groups, split, "groups"), metadata.weights, order, workers)
    raise ConfigError(f"split={split!r}: unknown. Use one of {', '.join(SPLITS)}")


def _required(categories: Indices | None, split: str, what: str) -> Indices:
    if categories is None:
        raise ConfigError(f"split={split!r}: this data has no {what}. Use split='iid'")
    return categories


def _by_dirichlet(categories: Indices, order: Indices, workers: int, alpha: float, stream: Stream) -> list[Indices]:
    generator = stream.generator()
    parts: list[list[Indices]] = [[] for _ in range(workers)]
    for category in np.unique(categories):
        members = order[categories[order] == category]
        shares = generator.dirichlet(np.full(workers, alpha))
        # Rounded at the cuts, not at the sizes, so that every example goes to exactly one worker.
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _by_group(groups: Indices, weights: Indices, order: Indices, workers: int) -> list[Indices]:
    """Greedy balancing: the largest group first, each to the worker with the least data; ties in random order."""
    names, first = np.unique(groups[order], return_index=True)
    if len(names) < workers:
        raise ConfigError(f"split='group': {workers} workers, but only {len(names)} groups. Use fewer workers")
    sizes = np.bincount(groups, weights=weights)[names]
    owner = np.zeros(int(names.max()) + 1, np.int64)
    loads = np.zeros(workers)
    for index in np.lexsort((first, -sizes)):
        least = int(loads.argmin())
        owner[names[index]] = least
        loads[least] += sizes[index]
    return [np.flatnonzero(owner[groups] == worker) for worker in range(workers)]


def _fill_small_parts(parts: list[Indices], metadata: ExampleMetadata) -> None:
    """Move examples from the largest part to parts that are too small to train on.

    A small alpha may leave a worker without any example. Each move makes the shortage smaller, so this ends.
    """
    sizes = [int(metadata.weights[part].sum()) for part in parts]
    while min(sizes) < metadata.minimum:
        smallest, largest = sizes.index(min(sizes)), sizes.index(max(sizes))
        moved = parts[largest][-1:]
        weight = int(metadata.weights[moved].sum())
        if sizes[largest] - weight < metadata.minimum:
            return
        parts[largest], parts[smallest] = parts[largest][:-1], np.concatenate([parts[smallest], moved])
        sizes[largest], sizes[smallest] = sizes[largest] - weight, sizes[smallest] + weight
