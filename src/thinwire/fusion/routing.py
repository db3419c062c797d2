"""Where the user's code calls torch, and every model's tensors are at hand: the call is led to a fused rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from thinwire.fusion.batch import Batch, Outside, current_level, is_batch, unwrap, wrap

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
COMPOSITES: dict[Any, Callable[..., Any]] = {}
DRAWS: set[Any] = set()


@dataclass(slots=True)
class Context:
    """Who is asking.

    Args:
        size: the number of models.
        generators: one per model, or None where torch's own serves all.
        model: the model that runs, where models run one after another.
    """

    size: int
    generators: Sequence[torch.Generator] | None = None
    model: int | None = None


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register how these functions of torch are computed for all models at once.

    A rule has the function's own signature after the `Context` and the function itself. It gets a `Batch` for what
    differs between models and plain tensors for what is shared, outside of all transforms, and returns batches.
    """

    def keep(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, found))
        return found

    return keep


class Router(TorchFunctionMode):
    """Inside, calls that have a rule are led to it; all others are left to `torch.vmap`."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.level = 0

    def at(self, level: int) -> Router:
        """To be entered within the transform of that number: code for one model runs there, and its calls are led."""
        self.level = level
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lead one call."""
        named = kwargs or {}
        found = RULES.get(func)
        if found is not None:
            return self._lead(found, func, args, named)
        composite = COMPOSITES.get(func)
        if composite is not None:
            with self:
                return composite(*args, **named)
        return func(*args, **named)

    def _lead(self, found: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.context.model is not None:
            return found(self.context, func, *args, **kwargs) if func in DRAWS else func(*args, **kwargs)
        level = self.level
        plain = [_unwrapped(value, level) for value in args]
        named = {name: unwrap(value, level) for name, value in kwargs.items()} if kwargs else kwargs
        if func not in DRAWS and not any(map(_is_own, (*plain, *named.values()))):
            return func(*args, **kwargs)
        if current_level() != level:
            return func(*args, **kwargs)
        with Outside():
            result = found(self.context, func, *plain, **named)
        if isinstance(result, Batch):
            return wrap(result, level)
        return pytree.tree_map(lambda leaf: wrap(leaf, level), result, is_leaf=is_batch)


def _unwrapped(value: Any, level: int) -> Any:
    """Of a list of tensors, each."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return [unwrap(part, level) for part in value]
    return unwrap(value, level)


def _is_own(value: Any) -> bool:
    """Whether models differ in it."""
    return isinstance(value, Batch) or (isinstance(value, list) and any(map(is_batch, value)))
