# SPDX-License-Identifier: Apache-2.0
"""Dropout and random tensors of all models at once, each model's from its own generator."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.arrays.fusion.batch import Batch, Value, along, split_models, stack_models
from thinwire.arrays.fusion.recording import constants, is_capturing
from thinwire.arrays.fusion.routing import RANDOM, Context, rule
from thinwire.core.torch_internals import SAMPLERS, pytree
from thinwire.errors import ConfigError

# The limit of SELU for large negative inputs, -scale * alpha.
_SATURATION = -1.7580993408473766


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


def _check_rate(p: float) -> None:
    wrong = [value for value in (p.values if isinstance(p, DropoutRates) else (p,)) if not 0 <= value <= 1]
    if wrong:
        raise ConfigError(f"dropout rate {wrong[0]}: a probability is in [0, 1]")


def draw_per_model(
    context: Context, like: Tensor, fill: Callable[[Tensor, int, torch.Generator | None], object], **options: Any
) -> Tensor:
    """Make a tensor [B, ...] of which every model's part is filled in place from its own generator.

    Generators fill in the order of memory: each part is laid out like that model's part of `like`, so that it gets the
    same numbers as in a separate run.
    """
    generators = context.generators if context.generators is not None else [None] * context.size
    if like.is_contiguous():
        found = torch.empty_like(like, **options)
        for model, generator in enumerate(generators):
            fill(found[model], model, generator)
        return found
    parts = [torch.empty_like(like[model], **options) for model in range(context.size)]
    for model, generator in enumerate(generators):
        fill(parts[model], model, generator)
    return torch.stack(parts)


def _keep_mask(context: Context, like: Tensor, p: float) -> Tensor:
    """Draw one where a value is kept and zero elsewhere, [B, ...] like `like`."""
    if context.generators is not None:
        return draw_per_model(
            context, like, lambda own, model, generator: _fill_kept_(own, rate_of(p, model), generator)
        )
    mask = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if not isinstance(p, DropoutRates):
        return mask.bernoulli_(1 - p)
    # In fp32 for every dtype of the mask.
    kept = constants(tuple(1 - rate for rate in p.values), like.new_empty(0, dtype=torch.float32))
    return mask.bernoulli_(kept.view(-1, *[1] * (like.dim() - 1)).expand_as(mask))


def _fill_kept_(mask: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
    """Fill with one where a value is kept; where all or none are, torch's dropout draws nothing either."""
    return mask.fill_(1 - rate) if rate in (0, 1) else mask.bernoulli_(1 - rate, generator=generator)


def _dropped(context: Context, input: Value, p: float, training: bool, shape: Callable[[Tensor], Tensor]) -> Any:
    """Apply dropout; `shape` makes a view of the mask's shape of a tensor."""
    _check_rate(p)
    if not training or (not isinstance(p, DropoutRates) and p == 0):
        return input
    # Kept values are divided by their probability; if all are dropped (rate 1), by one.
    if context.model is not None:
        assert isinstance(input, Tensor)
        rate = rate_of(p, context.model)
        mask = _fill_kept_(torch.empty_like(shape(input)), rate, _own_generator(context))
        return input * mask.div_(1 - rate or 1.0)
    x = along(input, 0, context.size)
    mask = _keep_mask(context, shape(x), p)
    if not isinstance(p, DropoutRates):
        return Batch(x * mask.div_(1 - p or 1.0), 0)
    kept = constants(tuple(1 - rate or 1.0 for rate in p.values), mask)
    return Batch(x * mask.div_(kept.view(-1, *[1] * (mask.dim() - 1))), 0)


def _own_generator(context: Context) -> torch.Generator | None:
    """Return the generator of the model that runs now, by itself."""
    assert context.model is not None
    return context.generators[context.model] if context.generators is not None else None


@rule(F.dropout)
def dropout(
    context: Context, function: Any, input: Value, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Zero values at each model's rate; `inplace` would save no memory here and is ignored."""
    tensor, generators = input.tensor if isinstance(input, Batch) else input, context.generators
    if tensor.is_cuda and generators is not None and generators[0].device.type == "cuda":
        return _dropped_on_gpu(context, input, p, training)
    return _dropped(context, input, p, training, lambda x: x)


def _dropped_on_gpu(context: Context, input: Value, p: float, training: bool) -> Any:
    """Torch's own dropout of each model: on a GPU it draws in an order of its own."""
    _check_rate(p)
    if context.model is not None:
        assert isinstance(input, Tensor)
        with _as_default(_own_generator(context)):
            return torch.dropout(input, rate_of(p, context.model), training)
    generators, x = context.generators or [], along(input, 0, context.size)
    parts: list[Tensor] = []
    for model, generator in enumerate(generators):
        with _as_default(generator):
            parts.append(torch.dropout(x[model].contiguous(), rate_of(p, model), training))
    return Batch(torch.stack(parts), 0)


@rule(F.dropout1d, F.dropout2d, F.dropout3d)
def dropout_channels(
    context: Context, function: Any, input: Value, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Zero whole channels at each model's rate; to `dropout2d` three axes are samples, channels and length."""
    dimensions = len(input.shape)
    spatial = next(axes for axes in (1, 2, 3) if f"dropout{axes}d" in function.__name__)
    # dropout2d knows no single sample: torch takes the first two axes to be samples and channels, whatever follows.
    inner = dimensions - 2 if function is F.dropout2d or dimensions == spatial + 2 else dimensions - 1
    return _dropped(context, input, p, training, lambda x: x[(..., *[slice(0, 1)] * inner)].contiguous())


@rule(F.alpha_dropout)
def alpha_dropout(
    context: Context, function: Any, input: Value, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """Set values to SELU's saturation at each model's rate, then restore mean and variance."""
    _check_rate(p)
    if not training or (not isinstance(p, DropoutRates) and p == 0):
        return input
    if context.model is not None:
        assert isinstance(input, Tensor)
        generator = _own_generator(context)
        own = Context(1, None if generator is None else [generator])
        return _alpha_dropped(own, input.unsqueeze(0), rate_of(p, context.model)).squeeze(0)
    return Batch(_alpha_dropped(context, along(input, 0, context.size), p), 0)


def _alpha_dropped(context: Context, x: Tensor, p: float) -> Tensor:
    mask = _keep_mask(context, x, p)
    shape = (-1, *[1] * (x.dim() - 1))
    rates = constants(tuple(rate_of(p, model) for model in range(context.size)), x).view(shape)
    scale = torch.where(rates == 1, 0.0, 1 / ((1 - rates) * (1 + rates * _SATURATION**2)).sqrt())
    return (x * mask + _SATURATION * (1 - mask)) * scale - _SATURATION * rates * scale


@rule(torch.rand_like, torch.randn_like)
def random_like(context: Context, function: Any, input: Value, **kwargs: Any) -> Any:
    """Draw noise in the shape of a value, each model's from its own generator."""
    fill_ = Tensor.uniform_ if function is torch.rand_like else Tensor.normal_
    options = {name: value for name, value in kwargs.items() if name in ("dtype", "device")}
    if kwargs.get("generator") is not None:  # the code's own, from which all models draw in turn
        context = Context(context.size, [kwargs["generator"]] * context.size, context.model)
    if context.model is not None:
        assert isinstance(input, Tensor)
        found = fill_(torch.empty_like(input, **options), generator=_own_generator(context))
        return found.requires_grad_(bool(kwargs.get("requires_grad")))
    like = along(input, 0, context.size).detach()
    fill = lambda own, _, generator: fill_(own, generator=generator)  # noqa: E731
    return Batch(draw_per_model(context, like, fill, **options), 0)


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
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, F.feature_alpha_dropout),
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
RANDOM.update((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout))
RANDOM.update((torch.rand_like, torch.randn_like, torch.rand, torch.randn))
