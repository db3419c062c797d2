"""Layer normalisation of many models, by torch: rows [models, count, n], each model with its own gain and shift."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.reference.bits import LANES, rooted


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What is normalised, and each row's mean and scale."""
    mean = _total(x) / _width(x)
    centred = x - mean
    scale = 1 / rooted(_total(centred * centred) / _width(x) + eps)
    return centred * scale * gain.unsqueeze(1) + shift.unsqueeze(1), mean.squeeze(2), scale.squeeze(2)


def layer_norm_back(
    gradient: Tensor, x: Tensor, gain: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, the gain and the shift; each of the latter two is added up row after row."""
    middle, factor = mean.unsqueeze(2), scale.unsqueeze(2)
    normal, of_x = (x - middle) * factor, gradient * gain.unsqueeze(1)
    of_gain, of_shift = torch.zeros_like(gain), torch.zeros_like(gain)
    for row in range(x.shape[1]):
        of_gain = of_gain + gradient[:, row] * normal[:, row]
        of_shift = of_shift + gradient[:, row]
    first, second = _total(of_x) / _width(x), _total(of_x * normal) / _width(x)
    return factor * (of_x - first - normal * second), of_gain, of_shift


def _width(x: Tensor) -> Tensor:
    return torch.tensor(float(x.shape[2]), device=x.device)


def _total(x: Tensor) -> Tensor:
    """The sum along the last axis, [models, count, 1], in the order of the compiled kernel."""
    whole = x.shape[2] // (8 * LANES) * 8 * LANES
    sums = x.new_zeros(*x.shape[:2], LANES)
    for block in x[..., :whole].split(8 * LANES, 2) if whole else ():
        rows = block.unflatten(2, (8, LANES))
        for _ in range(3):
            rows = rows[:, :, ::2] + rows[:, :, 1::2]
        sums = sums + rows[:, :, 0]
    for lanes in x[..., whole:].split(LANES, 2) if whole < x.shape[2] else ():
        sums = sums + torch.nn.functional.pad(lanes, (0, LANES - lanes.shape[2]))
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums
