# SPDX-License-Identifier: Apache-2.0
"""Normalization of many models in torch, each with its own gain and shift; the compiled kernels give the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import LANES, exact_sqrt


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized rows, and each row's mean and scale."""
    rows, own, moved = _rows(x, gain), gain.flatten(1).unsqueeze(1), shift.flatten(1).unsqueeze(1)
    mean = _total(rows) / _width(rows)
    centred = rows - mean
    scale = 1 / exact_sqrt(_total(centred * centred) / _width(rows) + eps)
    return (centred * scale * own + moved).view_as(x), mean.squeeze(2), scale.squeeze(2)


def layer_norm_back(
    gradient: Tensor, x: Tensor, gain: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the gain and the shift; the last two are summed row after row."""
    rows, back, own = _rows(x, gain), _rows(gradient, gain), gain.flatten(1)
    middle, factor = mean.unsqueeze(2), scale.unsqueeze(2)
    normal, of_x = (rows - middle) * factor, back * own.unsqueeze(1)
    of_gain, of_shift = torch.zeros_like(own), torch.zeros_like(own)
    for row in range(rows.shape[1]):
        of_gain = of_gain + back[:, row] * normal[:, row]
        of_shift = of_shift + back[:, row]
    first, second = _total(of_x) / _width(rows), _total(of_x * normal) / _width(rows)
    of_x = factor * (of_x - first - normal * second)
    return of_x.view_as(x), of_gain.view_as(gain), of_shift.view_as(gain)


def batch_norm(x: Tensor, gain: Tensor, shift: Tensor, axis: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each channel over all samples; means and variances are [models, channels]."""
    blocks = _models_first(x, axis)
    mean, variance = _moments(blocks.transpose(1, 2))
    factor = _scale(variance, eps) * gain
    found = (blocks - _per_channel(mean)) * _per_channel(factor) + _per_channel(shift)
    return _as_given(found, x, axis), mean, variance


def batch_norm_back(
    gradient: Tensor, x: Tensor, gain: Tensor, mean: Tensor, variance: Tensor, axis: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the gain and the shift."""
    blocks, back = _models_first(x, axis), _models_first(gradient, axis)
    scale, centred = _scale(variance, eps), blocks - _per_channel(mean)
    plain = _total(back).squeeze(3).transpose(1, 2)
    weighted = _total(back * (centred * _per_channel(scale))).squeeze(3).transpose(1, 2)
    factor = scale * gain
    first, second = (_mean(each, blocks[0, :, 0].numel()) for each in (plain, weighted))
    all, some = factor * first, scale * factor * second
    of_x = back * _per_channel(factor) - (_per_channel(all) + centred * _per_channel(some))
    return _as_given(of_x, x, axis), _sum_in_double(weighted).float(), _sum_in_double(plain).float()


def _rows(x: Tensor, gain: Tensor) -> Tensor:
    """Reshape to [models, rows, n]."""
    return x.reshape(len(x), -1, gain[0].numel())


def _models_first(x: Tensor, axis: int) -> Tensor:
    """Reshape to [models, samples, channels, positions]."""
    return x.reshape(*x.shape[:3], -1).transpose(0, axis)


def _as_given(found: Tensor, x: Tensor, axis: int) -> Tensor:
    """Reverse `_models_first`."""
    return found.transpose(0, axis).reshape(x.shape).contiguous()


def _moments(sets: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of [..., parts, positions]; a part is summed in fp32, and the parts in fp64."""
    count = sets.shape[-2] * sets.shape[-1]
    mean = _mean(_total(sets).squeeze(-1), count)
    centred = sets - mean[..., None, None]
    return mean, _mean(_total(centred * centred).squeeze(-1), count)


def _mean(parts: Tensor, count: int) -> Tensor:
    return (_sum_in_double(parts) / count).float()


def _sum_in_double(parts: Tensor) -> Tensor:
    """Sum along the last axis, one part after another."""
    total = parts.new_zeros(parts.shape[:-1], dtype=torch.float64)
    for part in parts.double().unbind(-1):
        total = total + part
    return total


def _scale(variance: Tensor, eps: float) -> Tensor:
    return 1 / exact_sqrt(variance + eps)


def _per_channel(value: Tensor) -> Tensor:
    """View [models, channels] to broadcast with [models, samples, channels, positions]."""
    return value.unsqueeze(1).unsqueeze(3)


def _width(x: Tensor) -> Tensor:
    return torch.tensor(float(x.shape[2]), dtype=torch.float32, device=x.device)


def _total(x: Tensor) -> Tensor:
    """Sum along the last axis, which is kept, in the order of the compiled kernel."""
    whole = x.shape[-1] // (8 * LANES) * 8 * LANES
    sums = x.new_zeros(*x.shape[:-1], LANES)
    for block in x[..., :whole].split(8 * LANES, -1) if whole else ():
        rows = block.unflatten(-1, (8, LANES))
        for _ in range(3):
            rows = rows[..., ::2, :] + rows[..., 1::2, :]
        sums = sums + rows[..., 0, :]
    for lanes in x[..., whole:].split(LANES, -1) if whole < x.shape[-1] else ():
        sums = sums + torch.nn.functional.pad(lanes, (0, LANES - lanes.shape[-1]))
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums
