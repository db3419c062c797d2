"""Layer normalisation of many models by one call: rows [models, count, n], each model with its own gain and shift."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.kernels.base import check_same_device, compiled
from laconic.kernels.reference import normalised


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
        return normalised.layer_norm(x, gain, shift, eps)
    found, mean, scale = torch.empty_like(x), x.new_empty(x.shape[:2]), x.new_empty(x.shape[:2])
    every = (x, torch.ones(x.shape[2]), gain, shift, found, mean, scale)
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
        return normalised.layer_norm_back(gradient, x, gain, mean, scale)
    of_x, of_gain, of_shift = torch.empty_like(x), torch.zeros_like(gain), torch.zeros_like(gain)
    every = (gradient, x, torch.ones(x.shape[2]), gain, mean, scale, of_x, of_gain, of_shift, torch.empty(x.shape[2]))
    library.laconic_layer_norm_back(*(tensor.data_ptr() for tensor in every), *x.shape)
    return of_x, of_gain, of_shift


def _check(x: Tensor, gain: Tensor, shift: Tensor) -> None:
    check_same_device(x, gain, shift)
    if x.dim() != 3 or gain.shape != (x.shape[0], x.shape[2]) or shift.shape != gain.shape:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (x, gain, shift))
        raise ConfigError(f"shapes {shapes}: must be [models, count, n], and [models, n] twice")
    for tensor in (x, gain, shift):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ConfigError(f"a tensor of {tensor.dtype}: must be contiguous and torch.float32")
