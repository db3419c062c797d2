"""Signs in a bit each, with a scale for every block.

A payload is all scales, then all signs: the bit of an element is that of its sign, so that -0.0 counts as negative.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from thinwire.kernels.base import (
    check_layout,
    check_length,
    check_norm,
    check_payload,
    check_same_device,
    compiled,
    on_gpu,
    single,
    writable,
)
from thinwire.kernels.reference import signs


def sign_nbytes(n: int, block: int, scale_bytes: int = 4) -> int:
    """Bytes of the payload of `n` elements."""
    return -(-n // block) * scale_bytes + -(-n // 8)


def encode_signs_(
    x: Tensor,
    error: Tensor | None,
    out: Tensor,
    *,
    block: int,
    norm: Literal["l1", "l2"] = "l1",
    scale_bytes: int = 4,
) -> None:
    r"""Write the signs and scales of `x + error` into `out`, and what they leave unsaid into `error`.

    The scale of a block is its mean absolute value ("l1") or its root mean square ("l2"), over elements that exist,
    rounded as it travels; what is left unsaid is measured from the rounded one. It is read once and written once.

    Args:
        x: fp32, [n]; other floats are converted.
        error: fp32, [n]; None is zero, and nothing is kept.
        out: uint8, `sign_nbytes(n, block, scale_bytes)`.
        block: elements that share a scale.
        norm: of the scales.
        scale_bytes: 4 for fp32, 2 for bf16.

    Raises:
        ConfigError: sizes do not fit.
    """
    check_layout(block, scale_bytes)
    check_norm(norm, ("l1", "l2"))
    check_payload(out, sign_nbytes(x.numel(), block, scale_bytes))
    check_same_device(x, error, out)
    if error is None:
        with writable(out, torch.uint8) as target:
            _encode_signs(single(x), None, target, block, norm, scale_bytes)
        return
    check_length("error", error.numel(), x.numel())
    with writable(out, torch.uint8) as target, writable(error, read=True) as rest:
        _encode_signs(single(x), rest, target, block, norm, scale_bytes)


def _encode_signs(x: Tensor, error: Tensor | None, out: Tensor, block: int, norm: str, scale_bytes: int) -> None:
    n, library = x.numel(), compiled(x)
    if n == 0:
        return
    if on_gpu(x):
        from thinwire.kernels import triton_signs

        triton_signs.encode_signs_(x, error, out, block=block, norm=norm, scale_bytes=scale_bytes)
    elif library is None:
        signs.encode_signs_(x, error, out, block=block, norm=norm, scale_bytes=scale_bytes)
    else:
        rest = None if error is None else error.data_ptr()
        library.thinwire_encode_signs(x.data_ptr(), rest, out.data_ptr(), n, block, norm == "l2", scale_bytes)


def decode_signs_(payload: Tensor, out: Tensor, *, block: int, scale_bytes: int = 4) -> None:
    """Write into `out`, fp32 [n], each element's scale with its sign; zero where the scale is zero.

    Raises:
        ConfigError: sizes do not fit.
    """
    sum_signs_(payload[None], out, block=block, scale_bytes=scale_bytes)


def sum_signs_(payloads: Tensor, out: Tensor, *, block: int, scale_bytes: int = 4) -> None:
    """Write into `out`, fp32 [n], the sum of what payloads, uint8 [m, bytes], stand for, in their order.

    Raises:
        ConfigError: sizes do not fit.
    """
    check_layout(block, scale_bytes)
    check_payload(payloads, sign_nbytes(out.numel(), block, scale_bytes))
    check_same_device(out, payloads)
    with writable(out) as target:
        _sum_signs(payloads.contiguous(), target, block, scale_bytes)


def _sum_signs(payloads: Tensor, out: Tensor, block: int, scale_bytes: int) -> None:
    (count, nbytes), n, library = payloads.shape, out.numel(), compiled(out)
    if n == 0:
        return
    if count == 0:
        out.zero_()
    elif on_gpu(out):
        from thinwire.kernels import triton_signs

        triton_signs.sum_signs_(payloads, out, block=block, scale_bytes=scale_bytes)
    elif library is None:
        signs.sum_signs_(payloads, out, block=block, scale_bytes=scale_bytes)
    else:
        library.thinwire_sum_signs(payloads.data_ptr(), count, nbytes, out.data_ptr(), n, block, scale_bytes)
