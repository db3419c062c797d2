"""Normalisation of many models by one call, each model with its own gain and shift."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.kernels.base import check_same_device, compiled
from laconic.kernels.reference import normalised as reference


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    r"""$y = \gamma_b (x - \mu) / \sqrt{\sigma^2 + \epsilon} + \beta_b$ for the rows of every model b.

    Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450, equations 3 and 4.

    Args:
        x: fp32 [models, count, n], contiguous.
        gain: $\gamma$, fp32 [models, n], contiguous.
        shift: $\beta$, as gain.
        eps: $\epsilon$; more bounds the scale of rows that hardly vary.

    Returns:
        y as x, and each row's $\mu$ and $1/\sqrt{\sigma^2 + \epsilon}$, fp32 [models, count].

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    _check(x, gain, shift)
    library = compiled(x)
    if library is None:
        return reference.layer_norm(x, gain, shift, eps)
    found, mean, scale = torch.empty_like(x), x.new_empty(x.shape[:2]), x.new_empty(x.shape[:2])
    every = (x, gain, shift, found, mean, scale)
    library.laconic_layer_norm(*(tensor.data_ptr() for tensor in every), *x.shape, eps)
    return found, mean, scale


def layer_norm_back(
    gradient: Tensor, x: Tensor, gain: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a gradient of `layer_norm` is for the input, the gain and the shift.

    Args:
        gradient: of y, as x.
        x: as it was given.
        gain: as it was given.
        mean: as it was returned.
        scale: as it was returned.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    _check(x, gain, gain)
    if gradient.shape != x.shape:
        raise ConfigError(f"a gradient of shape {list(gradient.shape)}: must be {list(x.shape)}, as the input")
    _check(gradient, gain, gain)
    library = compiled(x)
    if library is None:
        return reference.layer_norm_back(gradient, x, gain, mean, scale)
    of_x, of_gain, of_shift = torch.empty_like(x), torch.zeros_like(gain), torch.zeros_like(gain)
    every = (gradient, x, gain, mean, scale, of_x, of_gain, of_shift, torch.empty(x.shape[2]))
    library.laconic_layer_norm_back(*(tensor.data_ptr() for tensor in every), *x.shape)
    return of_x, of_gain, of_shift


def group_norm(x: Tensor, gain: Tensor, shift: Tensor, *, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    r"""$y_c = \gamma_{bc} (x_c - \mu) / \sqrt{\sigma^2 + \epsilon} + \beta_{bc}$, with moments of groups of channels.

    Wu and He, Group Normalization, arXiv:1803.08494, equations 1 to 7.

    Args:
        x: fp32 [models, samples, channels, places]; the channels of a sample are dense, and stride 0 along the models
            means that all see the same, which is read once.
        gain: $\gamma$, fp32 [models, channels], contiguous.
        shift: $\beta$, as gain.
        groups: a divisor of the channels.
        eps: $\epsilon$.

    Returns:
        y, which is dense with models or samples first, as x is (with samples first where x is the same for all), and
        $\mu$ and $\sigma^2$, [models, samples, groups].

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor does not lie as it must.
    """
    _check_groups(x, gain, shift, groups)
    library = compiled(x)
    if library is None:
        return reference.group_norm(x, gain, shift, groups, eps)
    found, inside = _like(x)
    mean, variance = (_like(x, groups)[0] for _ in range(2))
    every = (x, gain, shift, found, mean, variance, x.new_empty(x[0, 0].numel() // groups))
    sizes = *_axes(x, inside), groups, x.shape[2] // groups, x.shape[3], *_steps(x, inside)
    library.laconic_group_norm(*_addresses(every), *sizes, eps)
    return found, mean, variance


def group_norm_back(
    gradient: Tensor,
    x: Tensor,
    gain: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    groups: int,
    eps: float,
    trained: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """What a gradient of `group_norm` is for the input, the gain and the shift.

    Args:
        gradient: of y, [models, samples, channels, places]; copied unless it lies as y does.
        x: as it was given.
        gain: as it was given.
        mean: as it was returned.
        variance: as it was returned.
        groups: as given.
        eps: as given.
        trained: whether the input's gradient is asked for; else it is None.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor does not lie as it must.
    """
    _check_groups(x, gain, gain, groups)
    _check_gradient(gradient, x)
    library = compiled(x)
    if library is None:
        found = reference.group_norm_back(gradient, x, gain, mean, variance, groups, eps)
        return found[0] if trained else None, *found[1:]
    of_x, inside, back = _ready(gradient, x, trained)
    of_gain, of_shift = torch.zeros_like(gain), torch.zeros_like(gain)
    moments = _rows(mean, inside), _rows(variance, inside)
    every = (back, x, gain, *moments, of_x, of_gain, of_shift, x.new_empty(x.shape[3]))
    sizes = *_axes(x, inside), groups, x.shape[2] // groups, x.shape[3], *_steps(x, inside)
    library.laconic_group_norm_back(*_addresses(every), *sizes, eps)
    return of_x, of_gain, of_shift


def batch_norm(x: Tensor, gain: Tensor, shift: Tensor, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `group_norm`, with moments over all samples and places of a channel, [models, channels].

    Ioffe and Szegedy, Batch Normalization, arXiv:1502.03167, algorithm 1.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor does not lie as it must.
    """
    _check_channels(x, gain, shift)
    library = compiled(x)
    if library is None:
        return reference.batch_norm(x, gain, shift, eps)
    found, inside = _like(x)
    mean, variance = torch.empty_like(gain), torch.empty_like(gain)
    every = (x, gain, shift, found, mean, variance, x.new_empty(x.shape[3]))
    library.laconic_batch_norm(*_addresses(every), *_axes(x, inside), *x.shape[2:], *_steps(x, inside), eps)
    return found, mean, variance


def batch_norm_back(
    gradient: Tensor, x: Tensor, gain: Tensor, mean: Tensor, variance: Tensor, *, eps: float, trained: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """What a gradient of `batch_norm` is for the input, the gain and the shift; arguments as of `group_norm_back`.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor does not lie as it must.
    """
    _check_channels(x, gain, gain)
    _check_gradient(gradient, x)
    library = compiled(x)
    if library is None:
        found = reference.batch_norm_back(gradient, x, gain, mean, variance, eps)
        return found[0] if trained else None, *found[1:]
    of_x, inside, back = _ready(gradient, x, trained)
    of_gain, of_shift = torch.empty_like(gain), torch.empty_like(gain)
    every = (back, x, gain, mean.contiguous(), variance.contiguous(), of_x, of_gain, of_shift, x.new_empty(x.shape[3]))
    library.laconic_batch_norm_back(*_addresses(every), *_axes(x, inside), *x.shape[2:], *_steps(x, inside), eps)
    return of_x, of_gain, of_shift


def _models_inside(x: Tensor) -> bool:
    """Whether the samples come first in memory, and the models within each."""
    return x.stride(0) <= x.stride(1)


def _like(x: Tensor, *each: int) -> tuple[Tensor, bool]:
    """Dense room for [models, samples, ...] that lies as x does, of x's own numbers or so many of a sample.

    Also whether the models are inside.
    """
    models, samples, *rest = x.shape
    if _models_inside(x):
        return x.new_empty(samples, models, *(each or rest)).transpose(0, 1), True
    return x.new_empty(models, samples, *(each or rest)), False


def _ready(gradient: Tensor, x: Tensor, trained: bool) -> tuple[Tensor | None, bool, Tensor]:
    """Room for the input's gradient, whether the models are inside, and the gradient as the kernels read it."""
    inside = _models_inside(x)
    return _like(x)[0] if trained else None, inside, _rows(gradient, inside)


def _rows(value: Tensor, inside: bool) -> Tensor:
    """Of [models, samples, ...] dense rows in the order of memory."""
    return (value.transpose(0, 1) if inside else value).contiguous()


def _axes(x: Tensor, inside: bool) -> tuple[int, int, int]:
    models, samples = x.shape[:2]
    return (samples, models, 1) if inside else (models, samples, 0)


def _steps(x: Tensor, inside: bool) -> tuple[int, int]:
    return (x.stride(1), x.stride(0)) if inside else (x.stride(0), x.stride(1))


def _addresses(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _check_groups(x: Tensor, gain: Tensor, shift: Tensor, groups: int) -> None:
    _check_channels(x, gain, shift)
    if groups < 1 or x.shape[2] % groups:
        raise ConfigError(f"groups={groups} of {x.shape[2]} channels: must be a divisor")


def _check_channels(x: Tensor, gain: Tensor, shift: Tensor) -> None:
    _check_shapes(x, gain, shift, "models", "samples", "channels", "places")
    if not x.numel():
        raise ConfigError(f"an input of shape {list(x.shape)}: has no numbers to normalise")
    _check_dense(x[0, 0], gain, shift)


def _check_shapes(x: Tensor, gain: Tensor, shift: Tensor, *axes: str) -> None:
    """Gain and shift are of the first and the third axis."""
    check_same_device(x, gain, shift)
    if x.dim() != len(axes) or gain.shape != (x.shape[0], x.shape[2]) or shift.shape != gain.shape:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (x, gain, shift))
        raise ConfigError(f"shapes {shapes}: must be [{', '.join(axes)}], and [{axes[0]}, {axes[2]}] twice")


def _check_gradient(gradient: Tensor, x: Tensor) -> None:
    if gradient.shape != x.shape or gradient.dtype != x.dtype:
        found = f"{list(gradient.shape)} and {gradient.dtype}"
        raise ConfigError(f"a gradient of {found}: must be {list(x.shape)} and {x.dtype}, as the input")
    check_same_device(x, gradient)


def _check_dense(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ConfigError(f"a tensor of {tensor.dtype}: must be contiguous and torch.float32")


def _check(x: Tensor, gain: Tensor, shift: Tensor) -> None:
    _check_shapes(x, gain, shift, "models", "count", "n")
    _check_dense(x, gain, shift)
