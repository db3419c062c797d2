"""A part of the array, or all of it, that runs model after model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from thinwire.fusion.batch import Outside, is_batch, join, rows, unwrap, wrap
from thinwire.fusion.routing import Router
from thinwire.fusion.structure import Place


class Filled:
    """Inside, places hold other values; afterwards what they held.

    Args:
        every: the places.
        values: by the places' names.
    """

    __slots__ = ("_every", "_held", "_values")

    def __init__(self, every: Sequence[Place], values: Mapping[str, Any]) -> None:
        self._every, self._values = every, values

    def __enter__(self) -> None:
        """Put the values in."""
        new = [self._values[place.name] for place in self._every]
        self._held = [place.holder[place.key] for place in self._every]
        for place, value in zip(self._every, new, strict=True):
            place.holder[place.key] = value

    def __exit__(self, *_: object) -> None:
        """Put back what was there."""
        for place, tensor in zip(self._every, self._held, strict=True):
            place.holder[place.key] = tensor


def assigned(every: Sequence[Place], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers that a forward pass has replaced, by name; to be asked before `Filled` ends."""
    held = ((place.name, place.holder[place.key]) for place in every if not place.trained)
    return {name: tensor for name, tensor in held if tensor is not None and tensor is not values[name]}


class Loop:
    """A submodule of which every model's own copy, or own kind, is run in turn.

    Args:
        bodies: the module for each model; the same object where only tensors differ.
        every: each body's places of tensors.
        values: tells model b's tensors by their names.
        router: leads the calls of the array.
        keep: told which buffers model b has replaced.
    """

    def __init__(
        self,
        bodies: Sequence[nn.Module],
        every: Sequence[Sequence[Place]],
        values: Callable[[int], Mapping[str, Tensor]],
        router: Router,
        keep: Callable[[int, Mapping[str, Tensor]], None],
    ) -> None:
        self.bodies, self.every, self.values, self.router, self.keep = bodies, every, values, router, keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all bodies on each model's part of the arguments; from within the array's vmap."""
        level = self.router.level
        given = pytree.tree_map(lambda leaf: unwrap(leaf, level), (args, kwargs))
        with Outside():
            found = self.run(given)
        return pytree.tree_map(lambda leaf: wrap(leaf, level), found, is_leaf=is_batch)

    def run(self, given: tuple[Any, Any], function: Callable[..., Any] | None = None) -> Any:
        """Run all bodies, or a function for each, on trees of batches; returns a tree of batches."""
        context, results = self.router.context, list[Any]()
        try:
            for model, (args, kwargs) in enumerate(rows(given, len(self.bodies))):
                context.model = model
                results.append(self._one(model, function, args, kwargs))
        finally:
            context.model = None
        return join(results)

    def _one(self, model: int, function: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        body, every, values = self.bodies[model], self.every[model], self.values(model)
        with Filled(every, values), self.router:
            _refresh(body)
            found = (function or partial(type(body).forward, body))(*args, **kwargs)
            replaced = assigned(every, values)
        if replaced:
            self.keep(model, replaced)
        return found


def _refresh(body: nn.Module) -> None:
    """Recurrent layers keep a list of their weights beside their parameters."""
    for module in body.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]  # pyright: ignore
