# SPDX-License-Identifier: Apache-2.0
"""The wire format of a message: a header of fixed size, then the bytes of the vector, in parts.

The connection authenticates each part, so a frame has no checksum of its own. A frame of another protocol, run or
mailbox is ignored as foreign. A frame of this run with a wrong size is damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

VERSION = 2
_FIELDS = struct.Struct("!BBBxQIIIIQQQ")
HEADER_BYTES = _FIELDS.size
PART_BYTES = 1 << 18  # the limit on one part, and so on the memory that a stranger can make the receiver allocate
# The position is the number in the header, so append new dtypes at the end.
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class Kind(IntEnum):
    """The purpose of a frame."""

    MESSAGE = 0
    ACKNOWLEDGEMENT = 1
    CLOSE = 2
    FAILURE = 3  # the sender has failed, or knows of a failed rank
    LEAVING = 4  # the sender's process exits normally without closing its mailbox


class Header(NamedTuple):
    """The first part of every frame.

    Attributes:
        kind: the purpose of the frame.
        dtype: the vector's dtype, as a number.
        run: the secret number of the run.
        epoch: the number of the mailbox within the run.
        src: the sender's rank.
        dst: the receiver's rank.
        topic: the message's topic.
        step: the sender's step.
        number: the message's number on its edge; in an acknowledgement, how many messages were consumed.
        nbytes: the number of bytes of the vector.
    """

    kind: Kind
    dtype: int
    run: int
    epoch: int
    src: int
    dst: int
    topic: int
    step: int
    number: int
    nbytes: int

    def pack(self) -> bytes:
        """Return the header as bytes."""
        return _FIELDS.pack(VERSION, *self)


class DamagedError(ValueError):
    """A frame of this run has a wrong size."""


def parse(parts: Sequence[memoryview], *, run: int, epoch: int, dst: int) -> tuple[Header, Tensor] | None:
    """Parse a frame into its header and vector; None if the frame is foreign.

    Args:
        parts: the header and the parts of the vector, as they arrived; a vector of one part shares its memory.
        run: the secret number of this run.
        epoch: the number of this mailbox.
        dst: this rank.

    Raises:
        DamagedError: the frame belongs to this run, and its size is wrong.
    """
    if not parts or parts[0].nbytes != HEADER_BYTES:
        return None
    version, kind, dtype, *rest = _FIELDS.unpack(parts[0])
    if version != VERSION or kind not in list(Kind) or dtype >= len(_DTYPES):
        return None
    header = Header(Kind(kind), dtype, *rest)
    if (header.run, header.epoch, header.dst) != (run, epoch, dst):
        return None
    content = parts[1] if len(parts) == 2 else memoryview(bytearray().join(parts[1:]))
    if content.nbytes != header.nbytes:
        raise DamagedError(
            f"message {header.number} of rank {header.src} is damaged: it has {content.nbytes} bytes. Its header "
            f"announces {header.nbytes}"
        )
    if content.nbytes % _DTYPES[dtype].itemsize:
        raise DamagedError(
            f"message {header.number} of rank {header.src} is damaged: {content.nbytes} bytes are not a vector of "
            f"{str(_DTYPES[dtype]).removeprefix('torch.')}"
        )
    if not content.nbytes:  # torch.frombuffer refuses an empty buffer
        return header, torch.empty(0, dtype=_DTYPES[dtype], device="cpu")
    return header, torch.frombuffer(content, dtype=_DTYPES[dtype])


def split(data: memoryview) -> list[memoryview]:
    """Split a vector's bytes into the parts of a frame; an empty vector has no parts."""
    return [data[start : start + PART_BYTES] for start in range(0, data.nbytes, PART_BYTES)]


def dtype_number(x: Tensor) -> int:
    """Return the number of a vector's dtype in a header.

    Raises:
        ValueError: messages do not support the dtype.
    """
    return _DTYPES.index(x.dtype)


def bytes_of(x: Tensor) -> memoryview:
    """Return the bytes of a vector; a vector on a GPU is copied first."""
    if not x.numel():
        return memoryview(b"")
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
