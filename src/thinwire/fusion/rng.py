"""Dropout and random tensors of all models at once, each from its model's own generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.fusion.batch import Batch, Value, along
from thinwire.fusion.routing import DRAWS, Context, rule


class Rates(float):
    """A dropout rate that differs between models: as a number it is the first model's.

    Args:
        values: every model's rate.
    """

    values: tuple[float, ...]

    def __new__(cls, values: Sequence[float]) -> Rates:
        """Hold all, and look like the first."""
        made = super().__new__(cls, values[0])
        made.values = tuple(map(float, values))
        return made

    def __bool__(self) -> bool:
        return any(self.values)


def rate_of(p: float, model: int) -> float:
    """One model's rate."""
    return p.values[model] if isinstance(p, Rates) else p


def draw(
    context: Context, like: Tensor, fill: Callable[[Tensor, int, torch.Generator | None], object], **options: Any
) -> Tensor:
    """A new tensor [models, ...] of which every model's part is filled in place from its own generator.

    A part is laid out in memory like that model's part of `like`, because generators fill in the order of memory.
    """
    sources = context.generators if context.generators is not None else [None] * context.size
    if like.is_contiguous():
        found = torch.empty_like(like, **options)
        for model, source in enumerate(sources):
            fill(found[model], model, source)
        return found
    parts = [torch.empty_like(like[model], **options) for model in range(context.size)]
    for model, source in enumerate(sources):
        fill(parts[model], model, source)
    return torch.stack(parts)


def keep_mask(context: Context, like: Tensor, p: float) -> Tensor:
    """One where a value is kept and zero elsewhere, of shape [models, ...] like `like`."""
    if context.generators is not None:
        return draw(context, like, lambda own, model, source: own.bernoulli_(1 - rate_of(p, model), generator=source))
    mask = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if not isinstance(p, Rates):
        return mask.bernoulli_(1 - p)
    kept = torch.tensor([1 - rate for rate in p.values], device=like.device)
    return mask.bernoulli_(kept.view(-1, *[1] * (like.dim() - 1)).expand_as(mask))


def _scale(context: Context, p: float, like: Tensor) -> Tensor:
    """What is kept is divided by its probability; with nothing kept, by nothing."""
    kept = [1 - rate_of(p, model) or 1.0 for model in range(context.size)]
    return torch.tensor(kept, dtype=torch.float64).to(like).view(-1, *[1] * (like.dim() - 1))


def _drop(context: Context, input: Value, p: float, shape: Callable[[Tensor], Tensor]) -> Batch:
    x = along(input, 0, context.size)
    mask = keep_mask(context, shape(x), p)
    if isinstance(p, Rates):
        return Batch(x * mask.div_(_scale(context, p, mask)), 0)
    return Batch(x * mask.div_(1 - p or 1.0), 0)


def _solo(context: Context, input: Tensor, p: float, shape: Callable[[Tensor], Tensor]) -> Tensor:
    """The model that runs now, by itself."""
    assert context.model is not None
    source = context.generators[context.model] if context.generators is not None else None
    rate = rate_of(p, context.model)
    mask = torch.empty_like(shape(input)).bernoulli_(1 - rate, generator=source)
    return input * mask.div_(1 - rate or 1.0)


def _checked(p: float) -> None:
    wrong = [value for value in (p.values if isinstance(p, Rates) else (p,)) if not 0 <= value <= 1]
    if wrong:
        raise ConfigError(f"dropout rate {wrong[0]}: a probability is in [0, 1]")


def _dropped(context: Context, input: Value, p: float, training: bool, shape: Callable[[Tensor], Tensor]) -> Any:
    _checked(p)
    if not training or (not isinstance(p, Rates) and p == 0):
        return input
    if context.model is not None:
        assert isinstance(input, Tensor)
        return _solo(context, input, p, shape)
    return _drop(context, input, p, shape)


@rule(F.dropout)
def dropout(
    context: Context, function: Any, input: Value, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Zeros at each model's rate; `inplace` saves nothing here."""
    return _dropped(context, input, p, training, lambda x: x)


@rule(F.dropout1d, F.dropout2d, F.dropout3d)
def dropout_channels(
    context: Context, function: Any, input: Value, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Whole channels at once."""
    behind = next(i for i in (1, 2, 3) if f"dropout{i}d" in function.__name__)
    return _dropped(context, input, p, training, lambda x: x[(..., *[slice(0, 1)] * behind)])


_SATURATION = -1.7580993408473766


@rule(F.alpha_dropout)
def alpha_dropout(
    context: Context, function: Any, input: Value, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """SELU's saturation instead of zeros, then shifted and scaled so that mean and variance stay."""
    _checked(p)
    if not training or (not isinstance(p, Rates) and p == 0):
        return input
    if context.model is not None:
        assert isinstance(input, Tensor)
        source = context.generators[context.model] if context.generators is not None else None
        own = Context(1, None if source is None else [source])
        return _saturate(own, input.unsqueeze(0), rate_of(p, context.model)).squeeze(0)
    return Batch(_saturate(context, along(input, 0, context.size), p), 0)


def _saturate(context: Context, x: Tensor, p: float) -> Tensor:
    mask = keep_mask(context, x, p)
    shape = (-1, *[1] * (x.dim() - 1))
    rates = torch.tensor([rate_of(p, model) for model in range(context.size)], dtype=torch.float64).to(x).view(shape)
    scale = torch.where(rates == 1, 0.0, 1 / ((1 - rates) * (1 + rates * _SATURATION**2)).sqrt())
    return (x * mask + _SATURATION * (1 - mask)) * scale - _SATURATION * rates * scale


@rule(torch.rand_like, torch.randn_like)
def random_like(context: Context, function: Any, input: Value, **kwargs: Any) -> Any:
    """Noise in the shape of a value, each model's from its own generator."""
    in_place = Tensor.uniform_ if function is torch.rand_like else Tensor.normal_
    options = {name: value for name, value in kwargs.items() if name in ("dtype", "device")}
    trained = bool(kwargs.get("requires_grad"))
    if context.model is not None:
        assert isinstance(input, Tensor)
        source = context.generators[context.model] if context.generators is not None else None
        return in_place(torch.empty_like(input, **options), generator=source).requires_grad_(trained)
    like = along(input, 0, context.size).detach()
    return Batch(draw(context, like, lambda own, _, source: in_place(own, generator=source), **options), 0)


@rule(torch.rand, torch.randn)
def random(context: Context, function: Any, *shape: Any, **kwargs: Any) -> Any:
    """Noise of a shape, each model's from its own generator."""
    if kwargs.get("generator") is not None or context.generators is None:
        return _random_by(context, function, shape, kwargs, [kwargs.pop("generator", None)] * context.size)
    return _random_by(context, function, shape, kwargs, context.generators)


def _random_by(context: Context, function: Any, shape: Any, kwargs: Any, sources: Sequence[Any]) -> Any:
    if context.model is not None:
        return function(*shape, generator=sources[context.model], **kwargs)
    return Batch(torch.stack([function(*shape, generator=source, **kwargs) for source in sources]), 0)


DRAWS.update((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout))
DRAWS.update((torch.rand_like, torch.randn_like, torch.rand, torch.randn))
