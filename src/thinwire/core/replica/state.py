# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer, by the names of its parameters, as named tensors and JSON values.

An optimizer's own `state_dict` numbers parameters in the order of its groups, which may differ between two runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.kernels.decisions import host_copy
from thinwire.core.replica.shards import rewrap_, unwrap_dtensors

T = TypeVar("T")
# Keys that torch's schedulers add to a group, which may happen after a checkpoint was written or loaded.
SCHEDULED = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))


def parameter_names(optimizer: Optimizer, known: Mapping[int, str]) -> list[str]:
    """Return the names of an optimizer's parameters, in the order in which torch numbers them.

    Args:
        optimizer: the optimizer.
        known: names by the `id` of the parameter; any other parameter is named after its number.
    """
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return [known.get(id(p), f"parameter {i}") for i, p in enumerate(every)]


def pack_optimizer(
    optimizer: Optimizer, names: Sequence[str], *, only: Collection[str] | None = None
) -> dict[str, Any]:
    """Return a copy of the optimizer's `state_dict` in host memory, with parameters' names instead of numbers.

    Args:
        optimizer: the optimizer; DTensors in its state become this rank's shards.
        names: from `parameter_names`.
        only: the names of the parameters whose state is packed; all unless given. Groups are always packed whole.
    """
    state = unwrap_dtensors(optimizer.state_dict())
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    held = {names[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    held = {name: value for name, value in held.items() if only is None or name in only}
    copied = {**state, "state": held, "param_groups": groups}
    # `deepcopy` would copy the tensors of a GPU there.
    return deepcopy(copied, {id(x): host_copy(x.detach()) for x in _tensors_of(copied) if x.device.type != "cpu"})


def _tensors_of(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        tree = cast(Mapping[Any, Any] | Sequence[Any], tree)
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors_of(value)


def load_optimizer(optimizer: Optimizer, names: Sequence[str], packed: Mapping[str, Any]) -> None:
    """Restore what `pack_optimizer` returned, which stays unchanged.

    Settings that a scheduler has added to a group here, and that the packed state lacks, are kept.
    """
    # Optimizers keep the tensors they are given and change them in place.
    state = deepcopy(dict(packed))
    numbers = {name: number for number, name in enumerate(names)}
    own = iter(range(len(numbers)))
    added = [{k: group[k] for k in SCHEDULED & group.keys()} for group in optimizer.param_groups]
    groups = [
        {**mine, **group, "params": [next(own) for _ in group["params"]]}
        for mine, group in zip(added, state["param_groups"], strict=True)
    ]
    held = {numbers.get(name, name): value for name, value in state["state"].items()}
    optimizer.load_state_dict({**state, "state": held, "param_groups": groups})
    _restore_dtypes(optimizer, held)
    rewrap_(optimizer)


def _restore_dtypes(optimizer: Optimizer, held: Mapping[Any, Any]) -> None:
    """Undo torch's cast of a parameter's state to the parameter's dtype, which rounds products and counters."""
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for name, value in held.get(number, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device, copy=True)


def replace_entries(mapping: MutableMapping[str, T], new: Mapping[str, T]) -> None:
    """Replace all entries of a replica's state or messages in flight, in place, as its parts are views of them."""
    mapping.update(new)
    for name in mapping.keys() - new.keys():
        del mapping[name]
