# SPDX-License-Identifier: Apache-2.0
"""Dropout and random tensors of all models at once, each model's from its own generator."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.arrays.fusion.batch import Batch, Value, along, split_models, stack_models
from thinwire.arrays.fusion.recording import constants, is_capturing
from thinwire.arrays.fusion.routing import RANDOM, Context, rule
from thinwire.arrays.fusion.store import column
from thinwire.core.torch_internals import SAMPLERS, pytree
from thinwire.errors import ConfigError


class DropoutRates(float):
    """A dropout rate that differs between models; as a number it is the first model's.

    It must be a float: modules hold it where they hold their rate. Code that computes with it would take the first
    model's for all, and is refused.

    Args:
        values: every model's rate.
    """

    values: tuple[float, ...]

    def __new__(cls, values: Sequence[float]) -> DropoutRates:
        """Make a float of the first rate that holds all of them."""
        made = super().__new__(cls, values[0])
        made.values = tuple(map(float, values))
        return made

    def __bool__(self) -> bool:
        return any(self.values)

    def _refuse(self, *_: object) -> NoReturn:
        raise ConfigError(
            f"dropout rates {', '.join(map(str, self.values))}: the forward code computes with a rate that differs "
            "between models. Leave it to torch's dropout, make it equal, or run that layer in a loop: loop=[...]"
        )

    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __pow__ = __rpow__ = _refuse


def rate_of(p: float, model: int) -> float:
    """Return one model's rate."""
    return p.values[model] if isinstance(p, DropoutRates) else p


def _with_rates_of(given: Any, model: int) -> Any:
    """Return arguments with one model's rates."""
    return pytree.tree_map(lambda leaf: rate_of(leaf, model) if isinstance(leaf, float) else leaf, given)


def _keep_mask(context: Context, like: Tensor, p: float) -> Tensor:
    """Draw one where a value is kept and zero elsewhere, [B, ...] like `like`."""
    if context.generators is not None:
        found = torch.empty_like(like) if like.is_contiguous() else None
        # Generators fill in the order of memory: each part is laid out as in a separate run.
        parts = found.unbind() if found is not None else [torch.empty_like(part) for part in like]
        for model, (part, generator) in enumerate(zip(parts, context.generators, strict=True)):
            rate = rate_of(p, model)
            if rate in (0, 1):
                part.fill_(1 - rate)  # torch's dropout draws nothing either
            else:
                part.bernoulli_(1 - rate, generator=generator)
        return torch.stack(parts) if found is None else found
    mask = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if not isinstance(p, DropoutRates):
        return mask.bernoulli_(1 - p)
    # In fp32 for every dtype of the mask.
    kept = constants(tuple(1 - rate for rate in p.values), like.new_empty(0, dtype=torch.float32))
    return mask.bernoulli_(column(kept, like).expand_as(mask))


@rule(F.dropout)
def dropout(
    context: Context, function: Any, input: Value, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Zero values at each model's rate; `inplace` would save no memory here and is ignored."""
    rates = p.values if isinstance(p, DropoutRates) else (p,)
    wrong = [value for value in rates if not 0 <= value <= 1]
    if wrong:
        raise ConfigError(f"dropout rate {wrong[0]}: a probability is in [0, 1]")
    if not training or not any(rates):
        return input
    if context.model is not None:
        return draw(context, torch.dropout, input, p, training)
    x, generators = along(input, 0, context.size), context.generators
    if x.is_cuda and generators is not None and generators[0].device.type == "cuda":
        # On a GPU torch's own dropout draws in an order of its own.
        return draw(context, torch.dropout, Batch(x.contiguous(), 0), p, training)
    mask = _keep_mask(context, x, p)
    # Kept values are divided by their probability; if all are dropped (rate 1), by one.
    if not isinstance(p, DropoutRates):
        return Batch(x * mask.div_(1 - p or 1.0), 0)
    kept = constants(tuple(1 - rate or 1.0 for rate in rates), mask)
    return Batch(x * mask.div_(column(kept, mask)), 0)


@rule(F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
def dropout_of_model(
    context: Context,
    function: Any,
    input: Value,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
) -> Any:
    """Apply torch's own dropout of channels, or that of SELU, to each model's part; `inplace` is ignored."""
    if training is False:
        return input
    return draw(context, function, input, p, **({} if training is None else {"training": training}))


@rule(torch.rand, torch.randn)
def random(context: Context, function: Any, *shape: Any, **kwargs: Any) -> Any:
    """Draw noise of a shape, each model's from its own generator, unless the code passes one."""
    own, generators = kwargs.pop("generator", None), context.generators
    if own is not None or generators is None:
        generators = [own] * context.size
    if context.model is not None:
        return function(*shape, generator=generators[context.model], **kwargs)
    return Batch(torch.stack([function(*shape, generator=generator, **kwargs) for generator in generators]), 0)


@contextmanager
def _as_default(generator: torch.Generator | None) -> Generator[None]:
    """Within it, torch's own generator continues this one: functions that take no generator draw from it."""
    if generator is None:
        yield
        return
    device = generator.device
    own = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    if is_capturing():
        # A graph keeps where a generator stands on the GPU: both point to one state instead of copying it.
        held = own.graphsafe_get_state()
        own.graphsafe_set_state(generator.graphsafe_get_state())
        try:
            yield
        finally:
            own.graphsafe_set_state(held)
        return
    before = own.get_state()
    own.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(own.get_state())
        own.set_state(before)


_DRAWS = (
    *(torch.bernoulli, torch.normal, torch.poisson, torch.binomial, torch.multinomial, torch.randperm, torch.rrelu),
    *(torch.randint, torch.randint_like, Tensor.bernoulli, Tensor.multinomial, F.gumbel_softmax, F.rrelu),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
    *(torch.rand_like, torch.randn_like),
    *SAMPLERS,
    # Recurrent layers drop values between their layers.
    *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
)
_DRAWS_IN_PLACE = (
    *(Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_, Tensor.geometric_, Tensor.cauchy_),
    *(Tensor.log_normal_, Tensor.random_),
)


@rule(*_DRAWS)
def draw(context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that draws once per model, with the numbers of that model's own generator."""
    # Code that passes a generator draws from that one.
    generators = None if kwargs.get("generator") is not None else context.generators
    if context.model is not None:
        args, kwargs = _with_rates_of((args, kwargs), context.model)
        with _as_default(None if generators is None else generators[context.model]):
            return function(*args, **kwargs)
    results: list[Any] = []
    for model, given in enumerate(split_models((args, kwargs), context.size)):
        own, named = _with_rates_of(given, model)
        with _as_default(None if generators is None else generators[model]):
            results.append(function(*own, **named))
    return stack_models(results)


@rule(*_DRAWS_IN_PLACE)
def draw_in_place(context: Context, function: Any, input: Value, *args: Any, **kwargs: Any) -> Any:
    """Fill every model's part of a value with numbers of that model's own generator."""
    if context.model is not None:
        return draw(context, function, input, *args, **kwargs)
    if not isinstance(input, Batch):
        # As torch.vmap says it, so that the error names the layer.
        raise RuntimeError(
            f"vmap: in-place {function.__name__} of a tensor without models. Use torch.randn, torch.rand"
        )
    values = input.at(0)
    parts = [torch.empty_like(part) for part in values.detach()]
    for model, (part, given) in enumerate(zip(parts, split_models((args, kwargs), context.size), strict=True)):
        own = Context(context.size, context.generators, model)
        draw(own, function, part, *given[0], **given[1])
    values.copy_(torch.stack(parts))
    return input


@rule(torch.empty, torch.empty_like, Tensor.new_empty)
def empty(context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Memory for every model, also where nothing differs between them yet: it will be filled, often by a draw."""
    if context.model is not None:
        return function(*args, **kwargs)
    own, named = next(split_models((args, kwargs), context.size))
    one: Tensor = function(*own, **named)
    # Every model's part is laid out as in a separate run: generators fill in the order of memory.
    shape, stride = (context.size, *one.shape), (one.numel(), *one.stride())
    return Batch(torch.empty_strided(shape, stride, dtype=one.dtype, device=one.device), 0)


RANDOM.update((torch.empty, torch.empty_like, Tensor.new_empty))
RANDOM.update(_DRAWS)
RANDOM.update(_DRAWS_IN_PLACE)
RANDOM.update((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout))
RANDOM.update((torch.rand, torch.randn))
