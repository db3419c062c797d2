# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of many models at once: rows of a tensor [models, ...], each with its own hyperparameters.

Rows are independent. Several threads may share the columns without changing any bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.core.kernels.base import check_length, check_same_device, compiled, on_gpu, parallel_for, sample_of
from thinwire.core.kernels.reference import rows
from thinwire.errors import ConfigError

_REALS = (torch.float32, torch.float64)
# Fewer elements than this are updated before another thread has started.
_ELEMENTS_PER_THREAD = 1 << 18


class _Span(ctypes.Structure):
    """`span` of rows.c: the rows, the range of columns, and each row's numbers."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("models", "n", "begin", "end")),
        *((name, ctypes.c_void_p) for name in ("numbers", "active")),
    ]


def adam_rows_(
    x: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, most: Tensor | None, *, numbers: Tensor, active: Tensor
) -> None:
    r"""Take one step of Adam of every active model, in place.

    With the columns $a, d, s, r, k, t, c, \epsilon, \gamma$ of `numbers`,

    $$g \leftarrow g + d x, \qquad m \leftarrow m + s (g - m), \qquad v \leftarrow k v + t g^2, \qquad
      x \leftarrow a x - \gamma \frac{m}{c \sqrt v + \epsilon},$$

    where $m \leftarrow g - r (g - m)$ if $s \ge 1/2$, as in `torch.lerp`, and AMSGrad divides by the largest
    $v$ so far.

    Args:
        x: parameters, fp32 or fp64 [models, ...].
        gradient: as x; not changed.
        mean: $m$, as x.
        square: $v$, as x.
        most: the largest $v$ so far, as x; None without AMSGrad.
        numbers: fp64 [models, 9], on the device of x.
        active: bool [models], on the device of x; rows of other models are unchanged.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    tensors = [x, gradient, mean, square] if most is None else [x, gradient, mean, square, most]
    _check(tensors, numbers, 9, active)
    library = compiled(x)
    if library is None:
        step = rows.adam_rows_
        if on_gpu(x, _sample):
            from thinwire.core.kernels.triton_rows import adam_rows_ as step
        step(x, gradient, mean, square, most, numbers, active)
        return
    kernel = library.thinwire_adam_rows if x.dtype == torch.float32 else library.thinwire_adam_rows_double
    _run(kernel, [*tensors, None] if most is None else tensors, numbers, active)


def sgd_rows_(x: Tensor, gradient: Tensor, momentum: Tensor, *, numbers: Tensor, active: Tensor) -> None:
    r"""Take one step of stochastic gradient descent of every active model, in place.

    With the columns $d, \mu, t, n, \gamma$ of `numbers`, $g \leftarrow g + d x$ and $u \leftarrow \mu u + t g$, then
    $x \leftarrow x - \gamma u$; or $x \leftarrow x - \gamma (g + \mu u)$ if $n$ is not zero, which is Nesterov's
    momentum. If $\mu$ is zero, $u$ is unchanged and $x \leftarrow x - \gamma g$.

    Args:
        x: parameters, fp32 or fp64 [models, ...].
        gradient: as x; not changed.
        momentum: $u$, as x.
        numbers: fp64 [models, 5], on the device of x.
        active: bool [models], on the device of x; rows of other models are unchanged.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    _check([x, gradient, momentum], numbers, 5, active)
    library = compiled(x)
    if library is None:
        step = rows.sgd_rows_
        if on_gpu(x, _sample):
            from thinwire.core.kernels.triton_rows import sgd_rows_ as step
        step(x, gradient, momentum, numbers, active)
        return
    kernel = library.thinwire_sgd_rows if x.dtype == torch.float32 else library.thinwire_sgd_rows_double
    _run(kernel, [x, gradient, momentum], numbers, active)


def _check(tensors: list[Tensor], numbers: Tensor, columns: int, active: Tensor) -> None:
    shape, dtype = tensors[0].shape, tensors[0].dtype
    check_same_device(*tensors, numbers, active)
    for tensor in tensors:
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            found = f"{list(tensor.shape)} of {tensor.dtype}" + ("" if tensor.is_contiguous() else ", not contiguous")
            raise ConfigError(f"a tensor is {found}: must be {list(shape)} of {dtype}, like the parameters")
    if dtype not in _REALS:
        raise ConfigError(f"parameters have dtype {dtype}: rows must be fp32 or fp64. Convert them")
    check_length("active", active.numel(), shape[0])
    check_length("numbers", numbers.numel(), shape[0] * columns)
    for name, tensor, wanted in (("numbers", numbers, torch.float64), ("active", active, torch.bool)):
        if tensor.dtype != wanted or not tensor.is_contiguous():
            raise ConfigError(
                f"{name} of {tensor.dtype}: must be contiguous and {wanted}. Pass a contiguous copy of that type"
            )


def _run(kernel: Callable[..., None], tensors: Sequence[Tensor | None], numbers: Tensor, active: Tensor) -> None:
    """Call the kernel on all columns, or on one range of them per thread."""
    x = tensors[0]
    assert x is not None
    models, n = x.shape[0], x.numel() // x.shape[0]
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]

    def run(begin: int, end: int) -> None:
        span = _Span(models, n, begin, end, numbers.data_ptr(), active.data_ptr())
        kernel(*addresses, ctypes.byref(span))

    parallel_for(n, min(torch.get_num_threads(), x.numel() // _ELEMENTS_PER_THREAD), run)


def _sample(device: torch.device) -> list[Tensor]:
    """See `on_gpu`."""
    x, gradient, mean, square, most = (sample_of(device).view(2, -1).mul_(scale) for scale in (1.0, 0.5, 0.1, 0.2, 0.3))
    square, most, active = square.abs_(), most.abs_(), torch.ones(2, dtype=torch.bool, device=device)
    numbers = torch.full((2, 9), 0.1, dtype=torch.float64, device=device)
    adam_rows_(x, gradient, mean, square, most, numbers=numbers, active=active)
    sgd_rows_(x, gradient, mean, numbers=numbers[:, :5].contiguous(), active=active)
    return [x, mean, square, most]
