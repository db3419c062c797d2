# SPDX-License-Identifier: Apache-2.0
"""Tensors that hold one value of every model, on the internals of `torch.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.core.torch_internals import (
    add_batch_axis,
    batch_axis_of,
    enter_vmap,
    leave_vmap,
    level_of,
    load_vmap_rules,
    pytree,
    remove_batch_axis,
    resume_vmap,
    suspend_vmap,
    unbatched,
    vmap_level,
)


@dataclass(frozen=True, slots=True)
class Each:
    """Mark an argument of which every model has its own part; unmarked arguments are shared by all models.

    Args:
        tensor: of shape [models, ...]; `tensor[b]` is the argument of model b.

    Example:
        >>> import torch
        >>> from thinwire.arrays.fusion import Each, fuse
        >>> array = fuse([torch.nn.Identity(), torch.nn.Identity()])
        >>> array(Each(torch.tensor([[1.0], [2.0]]))).tolist()  # each model's own
        [[1.0], [2.0]]
        >>> array(torch.tensor([3.0])).tolist()  # shared by both
        [[3.0], [3.0]]
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One value of every model in one tensor, with the models along `axis`.

    The axis is wherever the last operation left it: moving it would often cost a copy.
    """

    tensor: Tensor
    axis: int

    @property
    def size(self) -> int:
        """The number of models."""
        return self.tensor.shape[self.axis]

    @property
    def shape(self) -> tuple[int, ...]:
        """One model's shape."""
        shape = self.tensor.shape
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    def at(self, axis: int) -> Tensor:
        """Return a view with the models along `axis`."""
        return self.tensor if axis == self.axis else self.tensor.movedim(self.axis, axis)


Value = Batch | Tensor  # a plain tensor is shared by all models


def tensor_of(value: Value) -> Tensor:
    """Return the tensor of all models, or the one that they share."""
    return value.tensor if isinstance(value, Batch) else value


def along(value: Value, axis: int, size: int) -> Tensor:
    """Return a view with the models along `axis`; a shared value is expanded without a copy."""
    if isinstance(value, Batch):
        return value.at(axis)
    return value.unsqueeze(axis).expand(*value.shape[:axis], size, *value.shape[axis:])


def contiguous(batch: Batch) -> tuple[Tensor, int]:
    """Return a contiguous tensor with the models along axis 0 or 1, and that axis; a view where one exists."""
    for axis in (batch.axis, 1 - batch.axis) if batch.axis < 2 else (1,):
        found = batch.at(axis)
        if found.is_contiguous():
            return found, axis
    return batch.at(1).contiguous(), 1


def fold(value: Value | None, size: int) -> Tensor | None:
    """Fold the models into the first axis of each: [models * channels, ...]."""
    return None if value is None else along(value, 0, size).flatten(0, 1)


# -- the transform of torch.vmap ---------------------------------------------------------------------------------------


def current_level() -> int:
    """Return the number of the innermost active transform."""
    return vmap_level() or 0


def unwrap(value: Any, level: int) -> Any:
    """Return a `Batch` for a tensor that vmap batches at `level`, and anything else unchanged."""
    if isinstance(value, Tensor) and level_of(value) == level:
        return Batch(unbatched(value), batch_axis_of(value))
    return value


def wrap(value: Any, level: int) -> Any:
    """Reverse `unwrap`."""
    if isinstance(value, Batch):
        return add_batch_axis(value.tensor, value.axis, level)
    return value


class Vmap:
    """Context manager: inside, code for one model runs for all models, as in `torch.vmap`; yields the level's number.

    Args:
        size: the number of models.
    """

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> int:
        """Begin the transform."""
        # As in torch.vmap: some operations are batched only by their decompositions.
        load_vmap_rules()
        # "different": random functions without a rule draw separately for each model.
        return enter_vmap(self._size, "different")

    def __exit__(self, *_: object) -> None:
        """End the transform."""
        leave_vmap()


def output_of(tensor: Tensor, level: int, size: int) -> Tensor:
    """Return what was computed inside `Vmap` with the models first: [models, ...]."""
    return remove_batch_axis(tensor, level, size, 0)


class WithoutVmap:
    """Context manager: inside, the innermost transform is suspended, so tensors are plain and random draws allowed."""

    __slots__ = ("_layer",)

    def __enter__(self) -> None:
        """Suspend the transform."""
        self._layer = suspend_vmap()

    def __exit__(self, *_: object) -> None:
        """Resume it."""
        resume_vmap(self._layer)


# -- models one after another ------------------------------------------------------------------------------------------


def is_batch(value: object) -> bool:
    """Return True if a value is a `Batch`; for pytree's `is_leaf`."""
    return isinstance(value, Batch)


def split_models(value: Any, size: int) -> Iterator[Any]:
    """Split a tree of values into one tree per model."""
    leaves, shape = pytree.tree_flatten(value, is_leaf=is_batch)
    parts = [leaf.tensor.unbind(leaf.axis) if isinstance(leaf, Batch) else (leaf,) * size for leaf in leaves]
    return (pytree.tree_unflatten([part[model] for part in parts], shape) for model in range(size))


def stack_models(results: Sequence[Any]) -> Any:
    """Stack one tree per model into a tree of batches; leaves that are not tensors are taken from the first model."""
    trees = [pytree.tree_flatten(result) for result in results]
    columns = zip(*(leaves for leaves, _ in trees), strict=True)
    merged = [Batch(torch.stack(column), 0) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(merged, trees[0][1])


def loop(function: Callable[..., Any], size: int, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function once per model and stack the results."""
    if kwargs or any(map(_may_hold_batches, args)):
        return stack_models([function(*own, **named) for own, named in split_models((args, kwargs), size)])
    # The usual case, without the cost of walking trees.
    columns = (arg.tensor.unbind(arg.axis) if isinstance(arg, Batch) else (arg,) * size for arg in args)
    results = [function(*own) for own in zip(*columns, strict=True)]
    return Batch(torch.stack(results), 0) if isinstance(results[0], Tensor) else stack_models(results)


def _may_hold_batches(value: object) -> bool:
    if isinstance(value, dict):
        return True
    return isinstance(value, list | tuple) and not all(isinstance(part, int | float) for part in value)
