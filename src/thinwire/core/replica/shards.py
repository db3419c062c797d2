# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters: DTensors, as FSDP2 and tensor parallelism make them.

FSDP2 owns the storage of its parameters, pads it and gathers from it, so they cannot be views of a replica's vector.
The vector holds copies of this rank's shards, which are read before a strategy runs and written back after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.replica.flat import copy_each_

MOST_NUMBERS = 64


def is_sharded(x: object) -> bool:
    """Return True if `x` is a DTensor."""
    return hasattr(x, "device_mesh")


def plain(x: Tensor) -> Tensor:
    """Return this rank's part as a plain tensor, whose functions do not communicate."""
    x = local(x)
    # For the gradient of a block of a mesh, torch's norms are those of the whole mesh.
    return x if type(x) is Tensor else x.as_subclass(Tensor)


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of `x`, in the same memory; `x` itself if it is not sharded."""
    if not is_sharded(x):
        return x
    with torch.no_grad():  # `to_local` is differentiable
        return cast(Any, x).to_local()


def whole_like(part: Tensor, like: Tensor) -> Tensor:
    """Make a DTensor like `like` with `part` as this rank's shard; `part` itself if `like` is not sharded."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    # Shape and stride are passed, since shards of uneven size do not determine them.
    shape = cast(Any, like)
    return DTensor.from_local(
        part, shape.device_mesh, shape.placements, run_check=False, shape=shape.shape, stride=shape.stride()
    )


def describe_shard(x: Tensor) -> str:
    """Describe this rank's shard of `x`, as in "part 0 of 2 along dimension 0"; empty if not sharded."""
    if not is_sharded(x):
        return ""
    mesh = cast(Any, x).device_mesh
    cuts = [(i, p.dim) for i, p in enumerate(cast(Any, x).placements) if p.is_shard()]
    return ", ".join(f"part {mesh.get_local_rank(i)} of {mesh.size(i)} along dimension {dim}" for i, dim in cuts)


def shard_folder(parameters: Iterable[Tensor]) -> str:
    """Return the folder name of this rank's shards, equal on ranks with equal shards; empty if unsharded."""
    place = next((place for place in map(describe_shard, parameters) if place), "")
    parts = [cut.split(" along ")[0].replace("part ", "").replace(" ", "-") for cut in place.split(", ") if cut]
    return "-".join(["shard", *parts]) if parts else ""


class Shards:
    """The sharded parameters of a model and their copies in the replicas' vectors; usually empty.

    Args:
        model: the model, which may use FSDP2.
        pairs: each sharded parameter with its view of a replica's `x`.

    Attributes:
        views: the parts of the vectors; empty if no parameter is sharded.
    """

    def __init__(self, model: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._parameters = [parameter for parameter, _ in pairs]
        self.views = [view for _, view in pairs]
        # After a forward pass without a backward pass FSDP2 keeps the gathered parameters, which would hide a write.
        found = (module for module in model.modules() if pairs and hasattr(module, "reshard"))
        self._gathered = [cast(Any, module) for module in found]

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather at most 64 numbers without negative ones from the ranks with the other shards of this copy."""
        rows = torch.full((1, MOST_NUMBERS), -1, dtype=torch.int64, device="cpu")
        rows[0, : len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        for group in self._groups():
            mine = rows.to(local(self._parameters[0]).device)
            found = [torch.empty_like(mine) for _ in range(group.size())]
            torch.distributed.all_gather(found, mine, group=group)
            rows = torch.cat(found).cpu()
        return [[number for number in row if number >= 0] for row in rows.tolist()]

    def _groups(self) -> list[Any]:
        """Return the process groups of the ranks among which parameters are cut."""
        found: dict[int, Any] = {}
        for parameter in self._parameters:
            mesh = cast(Any, parameter).device_mesh
            for dimension, placement in enumerate(cast(Any, parameter).placements):
                if placement.is_shard() and mesh.size(dimension) > 1:
                    group = mesh.get_group(dimension)
                    found.setdefault(id(group), group)
        return list(found.values())

    def read(self) -> None:
        """Copy this rank's shards into the vectors."""
        if self.views:
            with torch.no_grad():
                copy_each_(self.views, [local(p) for p in self._parameters])

    def write(self) -> None:
        """Copy the vectors back into this rank's shards."""
        if self.views:
            for module in self._gathered:
                module.reshard()
            with torch.no_grad():
                copy_each_([local(p) for p in self._parameters], self.views)


def unwrap_dtensors(tree: Any) -> Any:
    """Replace the DTensors in nested dicts and lists with this rank's shards."""
    if isinstance(tree, Tensor):
        return local(tree)
    if isinstance(tree, Mapping):
        return {key: unwrap_dtensors(value) for key, value in cast(Mapping[Any, Any], tree).items()}
    if isinstance(tree, list):
        return [unwrap_dtensors(value) for value in cast(list[Any], tree)]
    return tree


def rewrap_(optimizer: Optimizer) -> None:
    """Turn the shards in an optimizer's loaded state back into DTensors."""
    for parameter, state in optimizer.state.items():
        if is_sharded(parameter):
            for name, value in state.items():
                if isinstance(value, Tensor) and not is_sharded(value) and value.shape == local(parameter).shape:
                    state[name] = whole_like(value, parameter)
