# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of many models on a GPU, in one pass over memory; bits as on the CPU, except square roots in fp64."""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.kernels.base import on_its_device

_SPAN = 1024


@triton.jit
def _root(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def _quotient(x, y):
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def _adam(x, gradient, mean, square, most, numbers, active, n, SPAN: tl.constexpr, AMSGRAD: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    if tl.load(active + row) != 0:
        inner = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
        real, at = inner < n, row * n + inner
        real_type = x.dtype.element_ty
        own = numbers + row * 9
        shrink, decay = tl.load(own).to(real_type), tl.load(own + 1).to(real_type)
        weight, beta1 = tl.load(own + 2).to(real_type), tl.load(own + 3).to(real_type)
        beta2, square_weight = tl.load(own + 4).to(real_type), tl.load(own + 5).to(real_type)
        scale, eps, rate = (
            tl.load(own + 6).to(real_type),
            tl.load(own + 7).to(real_type),
            tl.load(own + 8).to(real_type),
        )
        old, g = tl.load(x + at, mask=real, other=0.0), tl.load(gradient + at, mask=real, other=0.0)
        m, v = tl.load(mean + at, mask=real, other=0.0), tl.load(square + at, mask=real, other=0.0)
        # Without decay an infinite parameter must not become NaN.
        g = tl.where(decay != 0, g + decay * old, g)
        difference = g - m
        m = tl.where(weight < 0.5, m + weight * difference, g - beta1 * difference)
        v = beta2 * v + square_weight * (g * g)
        tl.store(mean + at, m, mask=real)
        tl.store(square + at, v, mask=real)
        if AMSGRAD:
            largest = tl.load(most + at, mask=real, other=0.0)
            v = tl.where((largest >= v) | (largest != largest), largest, v)
            tl.store(most + at, v, mask=real)
        tl.store(x + at, old * shrink - rate * _quotient(m, _root(v) * scale + eps), mask=real)


@triton.jit
def _sgd(x, gradient, momentum, numbers, active, n, SPAN: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    if tl.load(active + row) != 0:
        inner = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
        real, at = inner < n, row * n + inner
        real_type = x.dtype.element_ty
        own = numbers + row * 5
        decay, mu, weight = (
            tl.load(own).to(real_type),
            tl.load(own + 1).to(real_type),
            tl.load(own + 2).to(real_type),
        )
        nesterov, rate = tl.load(own + 3).to(real_type), tl.load(own + 4).to(real_type)
        old, g = tl.load(x + at, mask=real, other=0.0), tl.load(gradient + at, mask=real, other=0.0)
        g = tl.where(decay != 0, g + decay * old, g)
        if mu != 0:
            u = mu * tl.load(momentum + at, mask=real, other=0.0) + weight * g
            tl.store(momentum + at, u, mask=real)
            g = tl.where(nesterov != 0, g + mu * u, u)
        tl.store(x + at, old - rate * g, mask=real)


def _grid(x: Tensor) -> tuple[int, tuple[int, int]]:
    """Return the elements of a row, and the programs."""
    n = x.numel() // x.shape[0]
    return n, (triton.cdiv(n, _SPAN), x.shape[0])


@on_its_device
def adam_rows_(
    x: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, most: Tensor | None, numbers: Tensor, active: Tensor
) -> None:
    """Run `thinwire.core.kernels.rows.adam_rows_`; nothing waits for the GPU."""
    n, grid = _grid(x)
    _adam[grid](
        *(x, gradient, mean, square, square if most is None else most, numbers, active.view(torch.uint8), n),
        SPAN=_SPAN,
        AMSGRAD=most is not None,
        enable_fp_fusion=False,
    )


@on_its_device
def sgd_rows_(x: Tensor, gradient: Tensor, momentum: Tensor, numbers: Tensor, active: Tensor) -> None:
    """Run `thinwire.core.kernels.rows.sgd_rows_`; nothing waits for the GPU."""
    n, grid = _grid(x)
    _sgd[grid](
        *(x, gradient, momentum, numbers, active.view(torch.uint8), n),
        SPAN=_SPAN,
        enable_fp_fusion=False,
    )
