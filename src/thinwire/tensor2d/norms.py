# SPDX-License-Identifier: Apache-2.0
"""Norms over features that are split over the columns, with statistics in fp32 at least."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.module import Module2D
from thinwire.tensor2d.placement import Axis, Placement
from thinwire.tensor2d.products import accumulation_dtype
from thinwire.tensor2d.tape import recorded


class LayerNorm2D(Module2D):
    r"""$y = g\,(x - m) / \sqrt{v + \epsilon} + b$ over all h features of a token.

    Each column computes the mean and the sum of squared deviations of its part. One message gathers these two numbers
    per token, and Chan's formula combines them without subtracting two large numbers. The backward pass all-reduces two
    numbers per token.

    Ba, Kiros and Hinton, Layer Normalization, 2016, arXiv:1607.06450; Chan, Golub and LeVeque, 1979.

    Args:
        weight: the whole gain, [h], or None.
        bias: the whole bias, [h], or None.
        mesh: the ranks.
        size: number of features, h.
        epsilon: added to the variance.

    Raises:
        ConfigError: the columns do not divide the features.
    """

    def __init__(
        self, weight: Tensor | None, bias: Tensor | None, mesh: Mesh2D, *, size: int, epsilon: float = 1e-5
    ) -> None:
        super().__init__(mesh)
        check_divides(size, mesh.columns, f"LayerNorm2D of {size} features", f"the mesh has {mesh.columns} columns")
        self.size, self.epsilon = size, epsilon
        for name, whole in {"weight": weight, "bias": bias}.items():
            self.place_(name, Placement((Axis(size, "columns"),)), whole)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b / r, ..., h / c] to the same shape."""
        y = cast(Tensor, _Normalized.apply(x, self.mesh, self.epsilon, True))
        gain, bias = self.shared("weight"), self.shared("bias")
        y = y if gain is None else y * gain
        return (y if bias is None else y + bias).to(x.dtype)


class RMSNorm2D(Module2D):
    r"""$y = g\,x / \sqrt{\operatorname{mean}(x^2) + \epsilon}$ over all h features of a token.

    Each direction all-reduces one number per token.

    Zhang and Sennrich, Root Mean Square Layer Normalization, NeurIPS 2019, arXiv:1910.07467.

    Args:
        weight: the whole gain, [h], or None.
        mesh: the ranks.
        size: number of features, h.
        epsilon: added to the mean square; None is the machine precision of the computing dtype, as in
            `torch.nn.RMSNorm`.

    Raises:
        ConfigError: the columns do not divide the features.
    """

    def __init__(self, weight: Tensor | None, mesh: Mesh2D, *, size: int, epsilon: float | None = 1e-6) -> None:
        super().__init__(mesh)
        check_divides(size, mesh.columns, f"RMSNorm2D of {size} features", f"the mesh has {mesh.columns} columns")
        self.size, self.epsilon = size, epsilon
        self.place_("weight", Placement((Axis(size, "columns"),)), weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b / r, ..., h / c] to the same shape."""
        y = cast(Tensor, _Normalized.apply(x, self.mesh, self.epsilon, False))
        gain = self.shared("weight")
        return (y if gain is None else y * gain).to(x.dtype)


class _Normalized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh2D, epsilon: float | None, centered: bool) -> Tensor:
        exact, size = x.to(accumulation_dtype(x.dtype)), x.shape[-1] * mesh.columns
        least = torch.finfo(exact.dtype).eps if epsilon is None else epsilon
        if centered:
            mean, scale = recorded(lambda: _mean_and_scale(exact, mesh, least)).unsqueeze(-1)
            y = ((exact - mean) * scale).to(x.dtype)
        else:
            scale = recorded(lambda: (mesh.along_row.all_reduce_(exact.square().sum(-1)).wait() / size + least).rsqrt())
            scale = scale.unsqueeze(-1)
            y = (exact * scale).to(x.dtype)
        # The backward pass needs y and not x, so only y is kept.
        ctx.save_for_backward(y, scale)
        ctx.mesh, ctx.centered = mesh, centered
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, scale = ctx.saved_tensors
        grad, y = grads[0].to(scale.dtype), y.to(scale.dtype)
        sums = torch.stack([(grad * y).sum(-1), *[grad.sum(-1)] * ctx.centered])
        along, *means = (ctx.mesh.along_row.all_reduce_(sums).wait() / (y.shape[-1] * ctx.mesh.columns)).unsqueeze(-1)
        for mean in means:
            grad = grad - mean
        return (scale * (grad - y * along)).to(grads[0].dtype), None, None, None


def _mean_and_scale(x: Tensor, mesh: Mesh2D, epsilon: float) -> Tensor:
    """Return [2, ...]: the mean over all columns, and the reciprocal of the standard deviation."""
    # Chan's formula: squared deviations of each part from its mean, plus those of the parts' means from the total mean.
    own = x.mean(-1)
    squares = (x - own.unsqueeze(-1)).square().sum(-1)
    parts = torch.stack(mesh.along_row.all_gather(torch.stack([own, squares])).wait())
    means, squares = parts.unbind(1)
    mean = means.mean(0)
    total = squares.sum(0) + x.shape[-1] * (means - mean).square().sum(0)
    return torch.stack([mean, (total / (x.shape[-1] * mesh.columns) + epsilon).rsqrt()])
