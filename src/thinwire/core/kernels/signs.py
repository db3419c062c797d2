# SPDX-License-Identifier: Apache-2.0
"""One bit per number: its sign, with a scale for every block.

A payload has all scales, then all sign bits of the floats: -0.0 counts as negative.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from thinwire.core.kernels.base import (
    as_fp32,
    check_code,
    check_norm,
    compiled,
    on_gpu,
    quantized_nbytes,
    sample_of,
    writable,
)
from thinwire.core.kernels.reading import join
from thinwire.core.kernels.reference import signs


def sign_nbytes(n: int, block: int, scale_bytes: int = 4) -> int:
    """Return the bytes of the payload of `n` elements."""
    return quantized_nbytes(n, 1, block, scale_bytes)


def pack_signs(x: Tensor) -> Tensor:
    """Pack the signs only, uint8 [ceil(n/8)]: element 8k + j is bit j of byte k."""
    n = x.numel()
    # `encode_signs_` writes a scale first, which is cut off.
    scaled = torch.empty(sign_nbytes(n, max(n, 1)), dtype=torch.uint8, device=x.device)
    encode_signs_(x, None, scaled, block=max(n, 1))
    return scaled[scaled.numel() - -(-n // 8) :].clone()


def unpack_signs(signs: Tensor, n: int) -> Tensor:
    """Reverse `pack_signs`: plus or minus one, fp32 [n]."""
    one = torch.ones(int(bool(n)), dtype=torch.float32, device=signs.device).view(torch.uint8)
    out = torch.empty(n, dtype=torch.float32, device=signs.device)
    decode_signs_(join([one, signs]), out, block=max(n, 1))
    return out


def encode_signs_(
    x: Tensor,
    residual: Tensor | None,
    out: Tensor,
    *,
    block: int,
    norm: Literal["l1", "l2"] = "l1",
    scale_bytes: int = 4,
) -> None:
    r"""Write the signs and scales of `x + residual` into `out`, and their error into `residual` (error feedback).

    The scale of a block is its mean absolute value ("l1") or its root mean square ("l2"). The new residual uses the
    rounded scale that is sent. The residual is read once and written once.

    Args:
        x: fp32, [n]; other floats are converted.
        residual: fp32, [n]; None for no error feedback.
        out: uint8, `sign_nbytes(n, block, scale_bytes)`.
        block: elements that share a scale.
        norm: the norm of the scales.
        scale_bytes: 4 for fp32, 2 for bf16.

    Raises:
        ConfigError: sizes do not fit.
    """
    check_norm(norm, ("l1", "l2"))
    check_code(x, out, residual, block=block, scale_bytes=scale_bytes)
    n = x.numel()
    if n == 0 or x.is_meta:
        return
    x, library = as_fp32(x), compiled(x)
    # Without a residual any tensor takes its place: the kernel gets None.
    with writable(out, torch.uint8) as target, writable(x if residual is None else residual, read=True) as kept:
        rest = None if residual is None else kept
        if library is not None:
            left = None if rest is None else rest.data_ptr()
            library.thinwire_encode_signs(x.data_ptr(), left, target.data_ptr(), n, block, norm == "l2", scale_bytes)
            return
        encode_by = signs.encode_signs_
        if on_gpu(x, _sample):
            from thinwire.core.kernels.triton_signs import encode_signs_ as encode_by
        encode_by(x, rest, target, block=block, norm=norm, scale_bytes=scale_bytes)


def decode_signs_(payload: Tensor, out: Tensor, *, block: int, scale_bytes: int = 4) -> None:
    """Decode into `out`, fp32 [n]: each element is its block's scale with the element's sign; zero if the scale is
    zero.

    Raises:
        ConfigError: sizes do not fit.
    """
    sum_signs_(payload[None], out, block=block, scale_bytes=scale_bytes)


def sum_signs_(payloads: Tensor, out: Tensor, *, block: int, scale_bytes: int = 4) -> None:
    """Decode payloads, uint8 [m, bytes], and write their sum, in their order, into `out`, fp32 [n].

    Raises:
        ConfigError: sizes do not fit.
    """
    check_code(out, payloads, block=block, scale_bytes=scale_bytes)
    (count, nbytes), n, payloads, library = payloads.shape, out.numel(), payloads.contiguous(), compiled(out)
    if n == 0 or out.is_meta:
        return
    with writable(out) as target:
        if count == 0:
            target.zero_()
        elif library is not None:
            library.thinwire_sum_signs(payloads.data_ptr(), count, nbytes, target.data_ptr(), n, block, scale_bytes)
        elif on_gpu(out, _sample):
            from thinwire.core.kernels import triton_signs

            triton_signs.sum_signs_(payloads, target, block=block, scale_bytes=scale_bytes)
        else:
            signs.sum_signs_(payloads, target, block=block, scale_bytes=scale_bytes)


def _sample(device: torch.device) -> list[Tensor]:
    """See `on_gpu`."""
    x = sample_of(device)
    payload = torch.empty(sign_nbytes(x.numel(), 2048), dtype=torch.uint8, device=device)
    rest, decoded = 0.1 * x, torch.empty_like(x)
    encode_signs_(x, rest, payload, block=2048)
    sum_signs_(torch.stack([payload, payload]), decoded, block=2048)
    # The scales are sums in another order.
    return [payload[4 * -(-x.numel() // 2048) :], rest, decoded]
