# SPDX-License-Identifier: Apache-2.0
"""Gradients of the linear layers of many models in one call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from thinwire.core.kernels.base import (
    STREAM_BYTES,
    WORK_PER_THREAD,
    check_dense,
    check_same_device,
    compiled,
    parallel_for,
)
from thinwire.errors import ConfigError


class _Layer(ctypes.Structure):
    """`layer` of linear.c."""

    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "x_model", "y_model", "stream")]


def weight_gradients(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the gradients of $W_b$ and $\beta_b$ in $y_b = x_b W_b^\top + \beta_b$, from the gradient of y.

    They equal torch's except for rounding.

    Args:
        x: fp32 [models, n, in], contiguous, or of stride 0 along the models if all share it.
        gradient: of y, fp32 [models, n, out], contiguous.

    Returns:
        [models, out, in] and [models, out], contiguous.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    check_same_device(x, gradient)
    if x.dim() != 3 or gradient.shape[:-1] != x.shape[:2] or not x.numel() or not gradient.numel():
        raise ConfigError(
            f"shapes {list(x.shape)} and {list(gradient.shape)}: must be [models, n, in] and [models, n, out]"
        )
    check_dense(x if x.stride(0) else x[0], gradient)
    library, (models, n, width), out = compiled(x), x.shape, gradient.shape[2]
    if library is None:
        return torch.bmm(gradient.transpose(1, 2), x), gradient.sum(1)
    of_weight, of_bias = x.new_empty(models, out, width), x.new_empty(models, out)
    layer = _Layer(
        rows=n,
        inputs=width,
        outputs=out,
        x_model=x.stride(0),
        y_model=gradient.stride(0),
        stream=of_weight.nbytes >= STREAM_BYTES,
    )
    # Called without a workspace, the kernel returns the size that it needs.
    nbytes = library.thinwire_linear_weights(*[None] * 4, ctypes.byref(layer), models, None)
    operands = [(each.data_ptr(), 4 * each.stride(0)) for each in (x, gradient, of_weight, of_bias)]

    def run(begin: int, end: int) -> None:
        workspace = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        own = (address + begin * step for address, step in operands)
        library.thinwire_linear_weights(*own, ctypes.byref(layer), end - begin, workspace.data_ptr())

    threads = min(torch.get_num_threads(), models, of_weight.numel() * n // WORK_PER_THREAD)
    parallel_for(models, threads, run)
    return of_weight, of_bias
