# SPDX-License-Identifier: Apache-2.0
"""The largest elements of each chunk of a vector, with packed positions and values of a few bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.base import (
    as_fp32,
    check_bits,
    check_length,
    check_payload,
    check_same_device,
    compiled,
    on_gpu,
    sample_of,
    writable,
)
from thinwire.core.kernels.reference import chunks
from thinwire.errors import ConfigError, NonFiniteError

MOST_CHUNK = 16384
"""The largest chunk; the buffers of chunks.c have this size."""


class _Chunking(ctypes.Structure):
    """`chunking` of chunks.c."""

    _fields_ = [(name, ctypes.c_int64) for name in ("n", "chunk", "kept")] + [
        (name, ctypes.c_int) for name in ("bits", "width")
    ]


def chunk_kept(n: int, chunk: int, kept: int) -> int:
    """Return the number of kept elements of a chunk of n: in proportion to a whole one, rounded up."""
    return -(-kept * n // chunk)


def chunked_nbytes(n: int, chunk: int, kept: int, bits: int) -> int:
    """Return the bytes of the payload of n elements."""

    def record(length: int) -> int:
        k = chunk_kept(length, chunk, kept)
        return 4 + -(-k * (chunk - 1).bit_length() // 8) + -(-k * bits // 8) if length else 0

    return n // chunk * record(chunk) + record(n % chunk)


def encode_chunks_(x: Tensor, residual: Tensor | None, out: Tensor, *, chunk: int, kept: int, bits: int) -> None:
    """Encode the largest elements of each chunk of `x + residual`, and keep the rest in the residual.

    Each chunk has a record of whole bytes: the scale in fp32; the positions in the chunk, ascending, in as few bits as
    the largest takes; the codes of the values, which are rounded by `encode_rounded_` as one block per chunk. The first
    of equal elements are sent.

    Args:
        x: fp32, [n]; other floats are converted.
        residual: like x; None for none.
        out: uint8, `chunked_nbytes(n, chunk, kept, bits)`.
        chunk: elements of a chunk, up to 16,384; the last chunk may be shorter.
        kept: elements sent of a whole chunk.
        bits: bits of a value, 1 to 8.

    Raises:
        ConfigError: sizes do not fit, or an argument is out of range.
        NonFiniteError: the vector contains NaN, which cannot be ordered; on a GPU, where the host does not wait to
            learn it, the payload is then of no use.
    """
    _check(x, out, chunk, kept, bits)
    check_same_device(x, out, residual)
    if residual is not None:
        check_length("residual", residual.numel(), x.numel())
    if x.numel() == 0 or x.is_meta:
        return
    x, library = as_fp32(x), compiled(x)
    # Without a residual any tensor takes its place: the kernel gets None.
    with writable(out, torch.uint8) as target, writable(x if residual is None else residual, read=True) as left:
        given = None if residual is None else left
        if library is None:
            encode_by: Callable[..., Tensor | None] = chunks.encode_chunks_
            if on_gpu(x, _sample):
                # Triton is optional, so its kernels are imported at use.
                from thinwire.core.kernels.triton_chunks import encode_chunks_ as encode_by
            flag = encode_by(x, given, target, chunk=chunk, kept=kept, bits=bits)
            finite = x.is_cuda or bool(flag)
        else:
            how = _Chunking(x.numel(), chunk, kept, bits, (chunk - 1).bit_length())
            at = None if given is None else given.data_ptr()
            finite = library.thinwire_encode_chunks(x.data_ptr(), at, target.data_ptr(), ctypes.byref(how)) == 0
    if not finite:
        raise NonFiniteError(f"some of {x.numel()} elements are NaN: their order is undefined")


def add_chunks_(payload: Tensor, out: Tensor, *, chunk: int, kept: int, bits: int, fresh: bool = False) -> None:
    """Add the elements of a payload to `out`, fp32 [n]; with `fresh`, to zeros, whatever `out` contains.

    Raises:
        ConfigError: sizes do not fit, an argument is out of range, or a position is outside its chunk; on a GPU, where
            the host does not wait to learn it, such elements are left out.
    """
    _check(out, payload, chunk, kept, bits)
    check_same_device(out, payload)
    if out.numel() == 0 or out.is_meta:
        return
    payload, library = payload.contiguous(), compiled(out)
    with writable(out, read=not fresh) as target:
        if on_gpu(out, _sample):
            from thinwire.core.kernels import triton_chunks

            triton_chunks.add_chunks_(target, payload, chunk=chunk, kept=kept, bits=bits, fresh=fresh)
            valid = True
        elif library is None:
            if fresh:
                target.zero_()
            flag = chunks.add_chunks_(payload, target, chunk=chunk, kept=kept, bits=bits)
            valid = out.is_cuda or bool(flag)
        else:
            if fresh:
                target.zero_()
            how = _Chunking(out.numel(), chunk, kept, bits, (chunk - 1).bit_length())
            valid = library.thinwire_decode_chunks(payload.data_ptr(), target.data_ptr(), ctypes.byref(how)) == 0
    if not valid:
        raise ConfigError(f"payload of {payload.numel()} bytes is damaged: a position is outside its chunk")


def _check(x: Tensor, payload: Tensor, chunk: int, kept: int, bits: int) -> None:
    if not 2 <= chunk <= MOST_CHUNK:
        raise ConfigError(f"chunk={chunk}: must lie in 2..{MOST_CHUNK}. 4096 is usual")
    if not 1 <= kept <= chunk:
        raise ConfigError(f"kept={kept}: must lie in 1..{chunk}, the elements of a chunk. 64 is usual")
    check_bits(bits)
    check_payload(payload, chunked_nbytes(x.numel(), chunk, kept, bits))


def _sample(device: torch.device) -> list[Tensor]:
    """See `on_gpu`."""
    x, found = sample_of(device).mul_(4).round_(), list[Tensor]()  # some elements are equal
    for chunk, kept, bits in ((4096, 64, 2), (512, 40, 6)):
        how: dict[str, Any] = {"chunk": chunk, "kept": kept, "bits": bits}
        payload = torch.empty(chunked_nbytes(x.numel(), **how), dtype=torch.uint8, device=device)
        rest, decoded = 0.1 * x, torch.ones_like(x)
        encode_chunks_(x, rest, payload, **how)
        add_chunks_(payload, decoded, **how)
        found += [payload, rest, decoded.clone()]
        add_chunks_(payload, decoded, fresh=True, **how)
        found.append(decoded)
    return found
