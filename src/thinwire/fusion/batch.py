"""Tensors with a model's axis: the one file that knows how `torch.vmap` keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.predispatch import lazy_load_decompositions
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Each:
    """An argument of which every model has its own: `tensor[b]` is model b's; arguments without it are shared by all.

    Args:
        tensor: of shape [models, ...].
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """What all models hold of one value, the models along `axis`, wherever it fell."""

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
        """The tensor with the models along `axis`; a view."""
        return self.tensor if axis == self.axis else self.tensor.movedim(self.axis, axis)


Value = Batch | Tensor


def along(value: Value, axis: int, size: int) -> Tensor:
    """A tensor with the models along `axis`; what is shared is repeated without a copy."""
    if isinstance(value, Batch):
        return value.at(axis)
    return value.unsqueeze(axis).expand(*value.shape[:axis], size, *value.shape[axis:])


def dense(batch: Batch) -> tuple[Tensor, int]:
    """A contiguous tensor with the models along its first or second axis, and which; a view where there is one."""
    for axis in (batch.axis, 1 - batch.axis) if batch.axis < 2 else (1,):
        found = batch.at(axis)
        if found.is_contiguous():
            return found, axis
    return batch.at(1).contiguous(), 1


def flat(value: Value | None, size: int) -> Tensor | None:
    """The models and the first axis of each in one: [models * channels, ...]."""
    return None if value is None else along(value, 0, size).flatten(0, 1)


def current_level() -> int:
    """The innermost transform's number; at least one must be under way."""
    return functorch.maybe_current_level() or 0


def unwrap(value: Any, level: int) -> Any:
    """A `Batch` for what vmap holds at `level`; anything else as it is."""
    if isinstance(value, Tensor) and functorch.maybe_get_level(value) == level:
        return Batch(functorch.get_unwrapped(value), cast(int, functorch.maybe_get_bdim(value)))
    return value


def wrap(value: Any, level: int) -> Any:
    """The reverse of `unwrap`."""
    if isinstance(value, Batch):
        return functorch._add_batch_dim(value.tensor, value.axis, level)
    return value


class Together:
    """Inside, code for one model runs for all of them, as within `torch.vmap`; its value is the transform's number.

    Args:
        size: the number of models.
    """

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> int:
        """Begin the transform."""
        lazy_load_decompositions()
        return functorch._vmap_increment_nesting(self._size, "different")

    def __exit__(self, *_: object) -> None:
        """End it."""
        functorch._vmap_decrement_nesting()


def leave(tensor: Tensor, level: int, size: int) -> Tensor:
    """What `Together` made, with the models first: [models, ...]."""
    return functorch._remove_batch_dim(tensor, level, size, 0)


class Outside:
    """Inside, torch is without the innermost transform: tensors are plain, and random draws are allowed."""

    __slots__ = ("_held",)

    def __enter__(self) -> None:
        """Leave the transform aside."""
        self._held = functorch.pop_dynamic_layer_stack()

    def __exit__(self, *_: object) -> None:
        """Take it up again."""
        functorch.push_dynamic_layer_stack(self._held)


def is_batch(value: object) -> bool:
    """Whether a value is a `Batch`: leaves of trees are told apart by it."""
    return isinstance(value, Batch)


def rows(value: Any, size: int) -> Iterator[Any]:
    """Each model's own copy of a tree of values."""
    leaves, shape = pytree.tree_flatten(value, is_leaf=is_batch)
    parts = [leaf.tensor.unbind(leaf.axis) if isinstance(leaf, Batch) else (leaf,) * size for leaf in leaves]
    return (pytree.tree_unflatten([part[model] for part in parts], shape) for model in range(size))


def join(results: Sequence[Any]) -> Any:
    """One tree of batches from every model's tree of tensors; what is no tensor is taken from the first model."""
    trees = [pytree.tree_flatten(result) for result in results]
    columns = zip(*(leaves for leaves, _ in trees), strict=True)
    merged = [Batch(torch.stack(column), 0) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(merged, trees[0][1])


def each(function: Callable[..., Any], size: int, *args: Any, **kwargs: Any) -> Any:
    """Call a function once per model, and put the results together: the plain loop."""
    if kwargs or any(map(_is_tree, args)):
        return join([function(*own, **named) for own, named in rows((args, kwargs), size)])
    columns = (arg.tensor.unbind(arg.axis) if isinstance(arg, Batch) else (arg,) * size for arg in args)
    results = [function(*own) for own in zip(*columns, strict=True)]
    return Batch(torch.stack(results), 0) if isinstance(results[0], Tensor) else join(results)


def _is_tree(value: object) -> bool:
    """Whether a value may hold batches in itself; one of tensors or numbers is passed on whole."""
    return isinstance(value, dict) or (isinstance(value, list | tuple) and not all(map(_is_number, value)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
