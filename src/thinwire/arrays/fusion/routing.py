# SPDX-License-Identifier: Apache-2.0
"""Dispatch the torch calls of a model's forward to rules that compute them for all models at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thinwire.arrays.fusion.batch import Batch, WithoutVmap, current_level, is_batch, unwrap, wrap
from thinwire.core.torch_internals import is_checkpointing, pytree
from thinwire.errors import ConfigError

Rule = Callable[..., Any]
Gradients = tuple[Tensor | None, ...]
RULES: dict[Any, Rule] = {}
# Functions that are computed by calls of other functions, which are dispatched in turn.
COMPOSITES: dict[Any, Callable[..., Any]] = {}
# Functions that draw random numbers: their rules also apply where models run one after another.
RANDOM: set[Any] = set()


@dataclass(slots=True)
class Context:
    """What a rule needs to know of the array.

    Args:
        size: the number of models.
        generators: one per model, or None if torch's own generator serves all models.
        model: the model that runs now, where models run one after another; None where all run at once.
    """

    size: int
    generators: Sequence[torch.Generator] | None = None
    model: int | None = None


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register how these functions of torch are computed for all models at once.

    A rule takes the `Context` and the function, and then the function's own arguments. It is called outside all
    transforms, with a `Batch` for what differs between models and a plain tensor for what is shared, and returns
    batches.
    """

    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, found))
        return found

    return register


class Router(TorchFunctionMode):
    """Inside, calls that have a rule are dispatched to it; all others are left to `torch.vmap`."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.level = 0
        self.within_checkpoint = False

    def at(self, level: int) -> Router:
        """Set the vmap level whose tensors belong to the models; returns the router, to be entered."""
        self.level = level
        return self.begin()

    def begin(self) -> Router:
        """Note whether the whole call is in a checkpoint; returns the router, to be entered."""
        self.within_checkpoint = is_checkpointing()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dispatch one call."""
        named = kwargs or {}
        found = RULES.get(func)
        if found is not None:
            return self._apply(found, func, args, named)
        composite = COMPOSITES.get(func)
        if composite is not None:
            with self:
                return composite(*args, **named)
        return func(*args, **named)

    def _apply(self, found: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_checkpointing() and not self.within_checkpoint:
            raise ConfigError(
                "torch.utils.checkpoint within the models of an array: its second pass, in the backward pass, does "
                "not know the models' tensors. Leave it out, or call checkpoint(array, inputs, use_reentrant=False)"
            )
        if self.context.model is not None:
            return found(self.context, func, *args, **kwargs) if func in RANDOM else func(*args, **kwargs)
        level = self.level
        plain = [_unwrapped(value, level) for value in args]
        named = {name: unwrap(value, level) for name, value in kwargs.items()} if kwargs else kwargs
        if func not in RANDOM and not any(map(_differs_between_models, (*plain, *named.values()))):
            return func(*args, **kwargs)
        # Inside a transform of the user's own, such as torch.func.grad, the tensors cannot be unwrapped.
        if current_level() != level:
            return func(*args, **kwargs)
        with WithoutVmap():
            result = found(self.context, func, *plain, **named)
        if isinstance(result, Batch):
            return wrap(result, level)
        return pytree.tree_map(lambda leaf: wrap(leaf, level), result, is_leaf=is_batch)


def _unwrapped(value: Any, level: int) -> Any:
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return [unwrap(part, level) for part in value]
    return unwrap(value, level)


def _differs_between_models(value: Any) -> bool:
    return isinstance(value, Batch) or (isinstance(value, list) and any(map(is_batch, value)))


def differentiable_gradients(
    ctx: Any, plain: Callable[..., Tensor], gradient: Tensor, inputs: Sequence[Tensor | None], *settings: Any
) -> Gradients:
    """Return gradients that can be differentiated again, for a backward whose own code cannot.

    Args:
        ctx: of the autograd function.
        plain: computes the same output by differentiable calls of torch.
        gradient: of the output.
        inputs: of the forward, first among its arguments.
        settings: its other arguments; None is returned for each.
    """
    needed = ctx.needs_input_grad[: len(inputs)]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need and x is not None]
    found = iter(torch.autograd.grad(plain(*inputs, *settings), wanted, gradient, create_graph=True))
    return *(next(found) if need else None for need in needed), *[None] * len(settings)


# -- clear errors for what torch.vmap refuses --------------------------------------------------------------------------

_CAUSES = (
    (re.compile(r"\.item\(\)"), "it reads a Python number out of a tensor (`.item()`, `float()`)"),
    (
        re.compile(r"data-dependent control flow"),
        "its path depends on a tensor's values, which differ between models",
    ),
    (
        re.compile(r"inplace|in-place|broadcast shape", re.I),
        "it writes each model's own values into a tensor that all models share",
    ),
    (
        re.compile(r"dynamic shape|data-dependent shape|nonzero|masked_select", re.I),
        "its shapes depend on a tensor's values",
    ),
    (re.compile(r"generate_vmap_rule|vmap staticmethod|does not have vmap"), "an autograd.Function has no vmap rule"),
)


def vmap_error(error: Exception, model: nn.Module) -> ConfigError | None:
    """Return an error that names the layer and the fix, for one that vmap raised; None for the user's own errors.

    Args:
        error: as raised by the forward pass.
        model: the model that ran.
    """
    text = str(error)
    if not re.search(r"vmap|functorch|BatchedTensor|Batching rule|match the broadcast shape", text):
        return None
    # The innermost frame whose `self` is one of the model's modules.
    paths, path, trace = {id(module): path for path, module in model.named_modules()}, "", error.__traceback__
    while trace is not None:
        path = paths.get(id(trace.tb_frame.f_locals.get("self")), path)
        trace = trace.tb_next
    layer = f"layer {path!r}" if path else "the model's own forward"
    cause = next((words for pattern, words in _CAUSES if pattern.search(text)), "torch.vmap does not support it")
    loop = f'loop=["{path}"] to fuse(), which runs that layer model after model' if path else "loop=True to fuse()"
    first = text.strip().splitlines()[0]
    made = ConfigError(f"{layer} cannot run for all models at once: {cause} ({first}). Pass {loop}")
    made.__cause__ = error
    return made
