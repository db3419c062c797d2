"""Optimizers of many models at once: rows of a tensor [models, ...], each with its own hyperparameters, in one pass.

No row sees another's numbers. Elements may be shared out to threads, which changes no bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.kernels.base import check_length, check_same_device, compiled, shared_out
from thinwire.kernels.reference import rows

_REALS = (torch.float32, torch.float64)
# Fewer elements than this are moved before another thread has begun.
_PART = 1 << 18


class _Span(ctypes.Structure):
    """`span` of rows.c: which elements of which rows are moved, and by what numbers."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("models", "n", "begin", "end")),
        *((name, ctypes.c_void_p) for name in ("numbers", "going")),
    ]


def adam_rows_(
    x: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, most: Tensor | None, *, numbers: Tensor, going: Tensor
) -> None:
    r"""One step of Adam of every model that is going, in place.

    With the columns $a, d, s, r, k, t, c, \epsilon, \gamma$ of `numbers`,

    $$g \leftarrow g + d x, \qquad m \leftarrow m + s (g - m), \qquad v \leftarrow k v + t g^2, \qquad
      x \leftarrow a x - \gamma \frac{m}{c \sqrt v + \epsilon},$$

    where the mean is $g - r (g - m)$ as soon as $s \ge 1/2$, and AMSGrad divides by the largest $v$ so far.

    Args:
        x: parameters, fp32 or fp64 [models, ...].
        gradient: as x; not changed.
        mean: $m$, as x.
        square: $v$, as x.
        most: the largest $v$ so far, as x; None without AMSGrad.
        numbers: fp64 [models, 9].
        going: bool [models]; rows of others are not touched.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    every = [x, gradient, mean, square] if most is None else [x, gradient, mean, square, most]
    _check(every, numbers, 9, going)
    library = compiled(x)
    if library is None:
        rows.adam_rows_(x, gradient, mean, square, most, numbers, going)
        return
    kernel = library.thinwire_adam_rows if x.dtype == torch.float32 else library.thinwire_adam_rows_double
    _share_out(kernel, [*every, None] if most is None else every, numbers, going)


def sgd_rows_(x: Tensor, gradient: Tensor, momentum: Tensor, *, numbers: Tensor, going: Tensor) -> None:
    r"""One step of stochastic gradient descent of every model that is going, in place.

    With the columns $d, \mu, t, n, \gamma$ of `numbers`, $g \leftarrow g + d x$ and $u \leftarrow \mu u + t g$, then
    $x \leftarrow x - \gamma u$; or $x \leftarrow x - \gamma (g + \mu u)$ where $n$ is not zero, which is Nesterov's
    momentum. Where $\mu$ is zero, u is not touched and x moves along g.

    Args:
        x: parameters, fp32 or fp64 [models, ...].
        gradient: as x; not changed.
        momentum: $u$, as x.
        numbers: fp64 [models, 5].
        going: bool [models]; rows of others are not touched.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor is not contiguous.
    """
    _check([x, gradient, momentum], numbers, 5, going)
    library = compiled(x)
    if library is None:
        rows.sgd_rows_(x, gradient, momentum, numbers, going)
        return
    kernel = library.thinwire_sgd_rows if x.dtype == torch.float32 else library.thinwire_sgd_rows_double
    _share_out(kernel, [x, gradient, momentum], numbers, going)


def _check(every: list[Tensor], numbers: Tensor, columns: int, going: Tensor) -> None:
    shape, dtype = every[0].shape, every[0].dtype
    check_same_device(*every)
    for tensor in every:
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            looks = f"{list(tensor.shape)} of {tensor.dtype}" + ("" if tensor.is_contiguous() else ", not contiguous")
            raise ConfigError(f"a row's tensor is {looks}: must be as the parameters, {list(shape)} of {dtype}")
    if dtype not in _REALS:
        raise ConfigError(f"parameters of {dtype}: rows are fp32 or fp64; convert them")
    check_length("going", going.numel(), shape[0])
    check_length("numbers", numbers.numel(), shape[0] * columns)
    for name, tensor, wanted in (("numbers", numbers, torch.float64), ("going", going, torch.bool)):
        if tensor.dtype != wanted or not tensor.is_contiguous():
            raise ConfigError(f"{name} of {tensor.dtype}: must be contiguous and {wanted}")


def _share_out(kernel: Callable[..., None], tensors: Sequence[Tensor | None], numbers: Tensor, going: Tensor) -> None:
    """Call the kernel on all columns, or on as many parts of them as there are threads."""
    x = tensors[0]
    assert x is not None
    models, n = x.shape[0], x.numel() // x.shape[0]
    places = [None if tensor is None else tensor.data_ptr() for tensor in tensors]

    def some(begin: int, end: int) -> None:
        span = _Span(models, n, begin, end, numbers.data_ptr(), going.data_ptr())
        kernel(*places, ctypes.byref(span))

    shared_out(n, min(torch.get_num_threads(), x.numel() // _PART), some)
