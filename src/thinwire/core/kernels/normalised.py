# SPDX-License-Identifier: Apache-2.0
"""Normalization of many models in one call, each model with its own gain and shift."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.kernels.base import check_dense, check_same_device, compiled
from thinwire.core.kernels.reference import normalised as reference
from thinwire.errors import ConfigError


class _Layers(ctypes.Structure):
    """`layers` of normalised.c: the rows of each model and their moments."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "gain", "means", "scales")),
        *((name, ctypes.c_int64) for name in ("models", "count", "n", "step")),
        ("eps", ctypes.c_float),
    ]


class _Blocks(ctypes.Structure):
    """`blocks` of normalised.c: the memory layout of each model's channels, and their moments."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "gain", "means", "variances")),
        *((name, ctypes.c_int64) for name in ("outer", "inner", "models_inner", "channels", "positions")),
        *((name, ctypes.c_int64) for name in ("x_outer", "x_inner")),
        ("eps", ctypes.c_float),
    ]


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    r"""$y = \gamma_b (x - \mu) / \sqrt{\sigma^2 + \epsilon} + \beta_b$ for the rows of every model b.

    Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450, equations 3 and 4.

    Args:
        x: fp32 [models, ..., n], contiguous, or of stride 0 along the models if all share it; a row may have several
            axes.
        gain: $\gamma$, fp32 [models, n], contiguous.
        shift: $\beta$, as gain.
        eps: $\epsilon$; a larger value bounds the scale of rows that hardly vary.

    Returns:
        y as x, and each row's $\mu$ and $1/\sqrt{\sigma^2 + \epsilon}$, fp32 [models, rows].

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    sizes = _rows(x, gain, shift)
    library = compiled(x)
    if library is None:
        return reference.layer_norm(x, gain, shift, eps)
    found, mean, scale = x.new_empty(x.shape), x.new_empty(sizes[:2]), x.new_empty(sizes[:2])
    layers = _Layers(*_addresses(x, gain, mean, scale), *sizes, eps)
    library.thinwire_layer_norm(ctypes.byref(layers), *_addresses(shift, found))
    return found, mean, scale


def layer_norm_back(
    gradient: Tensor, x: Tensor, gain: Tensor, mean: Tensor, scale: Tensor, *, trained: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of the input, the gain and the shift of `layer_norm`.

    Args:
        gradient: of y, as x; copied unless it is contiguous.
        x: as passed to `layer_norm`.
        gain: as passed.
        mean: as returned.
        scale: as returned.
        trained: whether the input's gradient is needed; else it is None.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    sizes = _rows(x, gain, gain)
    _check_gradient(gradient, x)
    _check_moments(mean, scale, x, (sizes[0], sizes[1]))
    library = compiled(x)
    if library is None:
        found = reference.layer_norm_back(gradient, x, gain, mean, scale)
        return found[0] if trained else None, *found[1:]
    of_x, of_gain, of_shift = x.new_empty(x.shape) if trained else None, torch.zeros_like(gain), torch.zeros_like(gain)
    given, normal = gradient.contiguous(), x.new_empty(sizes[2])
    layers = _Layers(*_addresses(x, gain, mean, scale), *sizes)
    library.thinwire_layer_norm_back(ctypes.byref(layers), *_addresses(given, of_x, of_gain, of_shift, normal))
    return of_x, of_gain, of_shift


def batch_norm(x: Tensor, gain: Tensor, shift: Tensor, *, axis: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    r"""$y_c = \gamma_{bc} (x_c - \mu) / \sqrt{\sigma^2 + \epsilon} + \beta_{bc}$, with moments of each channel.

    Ioffe and Szegedy, Batch Normalization, arXiv:1502.03167, algorithm 1.

    Args:
        x: fp32 [models, samples, channels, positions...], or with samples first; contiguous, or of stride 0 along the
            models if all share it, whose moments are then computed once.
        gain: $\gamma$, fp32 [models, channels], contiguous.
        shift: $\beta$, as gain.
        axis: of the models, 0 or 1.
        eps: $\epsilon$.

    Returns:
        y, contiguous, and $\mu$ and $\sigma^2$ over all samples and positions of a channel, [models, channels].

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    _check_blocks(x, gain, shift, axis)
    library = compiled(x)
    if library is None:
        return reference.batch_norm(x, gain, shift, axis, eps)
    found, mean, variance = x.new_empty(x.shape), torch.empty_like(gain), torch.empty_like(gain)
    blocks = _blocks(x, gain, mean, variance, axis, eps)
    library.thinwire_batch_norm(ctypes.byref(blocks), *_addresses(shift, found))
    return found, mean, variance


def batch_norm_back(
    gradient: Tensor,
    x: Tensor,
    gain: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    axis: int,
    eps: float,
    trained: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of the input, the gain and the shift of `batch_norm`.

    Args:
        gradient: of y, as y; copied unless it is contiguous.
        x: as passed to `batch_norm`.
        gain: as passed.
        mean: as returned.
        variance: as returned.
        axis: as passed.
        eps: as passed.
        trained: whether the input's gradient is needed; else it is None.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    _check_blocks(x, gain, gain, axis)
    _check_gradient(gradient, x)
    _check_moments(mean, variance, x, gain.shape)
    library = compiled(x)
    if library is None:
        found = reference.batch_norm_back(gradient, x, gain, mean, variance, axis, eps)
        return found[0] if trained else None, *found[1:]
    of_x, of_gain, of_shift = x.new_empty(x.shape) if trained else None, torch.empty_like(gain), torch.empty_like(gain)
    given, blocks = gradient.contiguous(), _blocks(x, gain, mean, variance, axis, eps)
    library.thinwire_batch_norm_back(ctypes.byref(blocks), *_addresses(given, of_x, of_gain, of_shift))
    return of_x, of_gain, of_shift


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _rows(x: Tensor, gain: Tensor, shift: Tensor) -> tuple[int, int, int, int]:
    """Return the models, the rows of each, the numbers in a row, and the stride from model to model.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    check_same_device(x, gain, shift)
    own, width = gain.shape, gain.dim() - 1
    if not 0 < width < x.dim() or x.shape[:1] + x.shape[-width:] != own or shift.shape != own:
        raise ConfigError(f"{_shapes(x, gain, shift)}: must be [models, ..., n], and [models, n] twice")
    _check_filled(x)
    check_dense(x if x.stride(0) else x[0], gain, shift)
    return own[0], x.numel() // gain.numel(), gain.numel() // own[0], x.stride(0)


def _blocks(x: Tensor, gain: Tensor, mean: Tensor, variance: Tensor, axis: int, eps: float) -> _Blocks:
    outer, inner, channels = x.shape[:3]
    positions = x.numel() // (outer * inner * channels)
    addresses = _addresses(x, gain, mean, variance)
    return _Blocks(*addresses, outer, inner, axis, channels, positions, *x.stride()[:2], eps)


def _check_blocks(x: Tensor, gain: Tensor, shift: Tensor, axis: int) -> None:
    """Check that tensors can be normalized by channels.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    check_same_device(x, gain, shift)
    if axis not in (0, 1):
        raise ConfigError(f"axis={axis}: must be 0 or 1, the axis of the models")
    if x.dim() < 3 or gain.shape != (x.shape[axis], x.shape[2]) or shift.shape != gain.shape:
        first = "models, samples" if axis == 0 else "samples, models"
        raise ConfigError(f"{_shapes(x, gain, shift)}: must be [{first}, channels, ...], and [models, channels] twice")
    _check_filled(x)
    check_dense(x.select(axis, 0) if x.stride(axis) == 0 else x, gain, shift)


def _check_filled(x: Tensor) -> None:
    if not x.numel():
        raise ConfigError(f"an input of shape {list(x.shape)}: it has no numbers to normalize. Leave empty batches out")


def _check_gradient(gradient: Tensor, x: Tensor) -> None:
    if gradient.shape != x.shape or gradient.dtype != x.dtype:
        found = f"{list(gradient.shape)} and {gradient.dtype}"
        raise ConfigError(f"a gradient of {found}: must be {list(x.shape)} and {x.dtype}, like the input")
    check_same_device(x, gradient)


def _check_moments(mean: Tensor, spread: Tensor, x: Tensor, shape: Sequence[int]) -> None:
    check_same_device(x, mean, spread)
    check_dense(mean, spread)
    if mean.shape != tuple(shape) or spread.shape != mean.shape:
        raise ConfigError(f"moments of {_shapes(mean, spread)}: must be {list(shape)}, as returned by the forward pass")


def _shapes(*tensors: Tensor) -> str:
    return f"shapes {', '.join(str(list(tensor.shape)) for tensor in tensors)}"
