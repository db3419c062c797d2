"""Gradients of linear layers of many models by one call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.kernels.base import AWAY_BYTES, PART, check_same_device, compiled, shared_out


class _Layer(ctypes.Structure):
    """`layer` of linear.c."""

    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "x_model", "y_model", "away")]


def weights_between(x: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
    r"""The gradients of the weights and of the shifts of $y_b = x_b W_b^\top + \beta_b$, from that of y.

    Equal to torch's but for rounding.

    Args:
        x: fp32 [models, n, in], contiguous, or of stride 0 along the models, which then all see the same.
        sent: the gradient of y, fp32 [models, n, out], contiguous.

    Returns:
        [models, out, in] and [models, out], contiguous.

    Raises:
        ConfigError: shapes, dtypes or devices differ, or a tensor does not lie as it must.
    """
    check_same_device(x, sent)
    if x.dim() != 3 or sent.shape[:-1] != x.shape[:2] or not x.numel() or not sent.numel():
        raise ConfigError(
            f"shapes {list(x.shape)} and {list(sent.shape)}: must be [models, n, in] and [models, n, out]"
        )
    for tensor in (x if x.stride(0) else x[0], sent):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ConfigError(f"a tensor of {tensor.dtype}: must be contiguous and torch.float32")
    library, (models, n, width), out = compiled(x), x.shape, sent.shape[2]
    if library is None:
        return torch.bmm(sent.transpose(1, 2), x), sent.sum(1)
    found, of_shift = x.new_empty(models, out, width), x.new_empty(models, out)
    layer = _Layer(
        rows=n,
        inputs=width,
        outputs=out,
        x_model=x.stride(0),
        y_model=sent.stride(0),
        away=found.nbytes >= AWAY_BYTES,
    )
    nbytes = library.thinwire_linear_weights(*[None] * 4, ctypes.byref(layer), models, None)
    places = [(each.data_ptr(), 4 * each.stride(0)) for each in (x, sent, found, of_shift)]

    def some(begin: int, end: int) -> None:
        room = torch.empty(nbytes, dtype=torch.uint8)
        own = (at + begin * step for at, step in places)
        library.thinwire_linear_weights(*own, ctypes.byref(layer), end - begin, room.data_ptr())

    shared_out(models, min(torch.get_num_threads(), models, found.numel() * n // PART), some)
    return found, of_shift
