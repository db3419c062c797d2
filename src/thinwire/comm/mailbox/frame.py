"""What goes over a message's wire: a header of fixed size, and the bytes of the vector as they lie in memory.

Nothing that arrives is trusted. Whatever is not of this protocol, run and mailbox belongs to strangers; what is, and
does not add up, is damaged.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

MAGIC = b"lacn"
VERSION = 1
_FIELDS = struct.Struct("!4sBBBxQIIIIQQQI")
_CHECK = struct.Struct("!I")
HEADER_BYTES = _FIELDS.size + _CHECK.size
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class Kind(IntEnum):
    """What a frame is for."""

    MESSAGE = 0
    ROOM = 1
    GOODBYE = 2


class Header(NamedTuple):
    """The first part of every frame.

    Attributes:
        kind: what it is for.
        dtype: of the vector, as a number.
        run: the secret number of the run.
        epoch: which mailbox of the run.
        src: the sender's rank.
        dst: the receiver's rank.
        topic: what a message is about.
        step: the sender's.
        number: of a message on its edge; where room is made, how many messages have been taken.
        nbytes: of the vector.
        checksum: CRC-32 of the vector's bytes.
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
    checksum: int

    def pack(self) -> bytes:
        """The header's bytes, with a checksum of their own."""
        fields = _FIELDS.pack(MAGIC, VERSION, *self)
        return fields + _CHECK.pack(zlib.crc32(fields))


class DamagedError(ValueError):
    """A frame of ours whose bytes are not those that were sent."""


def parse(parts: Sequence[memoryview], *, run: int, epoch: int, dst: int) -> tuple[Header, Tensor] | None:
    """The header and the vector of a frame, which shares its memory; None where it is not meant for us.

    Args:
        parts: what arrived.
        run: the secret number of this run.
        epoch: which mailbox this is.
        dst: this rank.

    Raises:
        DamagedError: it is of this run, and does not add up.
    """
    header = _header(parts, run)
    if header is None or (header.run, header.epoch, header.dst) != (run, epoch, dst):
        return None
    content = parts[1] if len(parts) == 2 else memoryview(b"")
    if content.nbytes != header.nbytes or zlib.crc32(content) != header.checksum:
        raise DamagedError(f"message {header.number} of rank {header.src} is damaged: its checksum does not fit")
    dtype = _DTYPES[header.dtype]
    if not content.nbytes:
        return header, torch.empty(0, dtype=dtype)
    return header, torch.frombuffer(content, dtype=dtype)


def _header(parts: Sequence[memoryview], run: int) -> Header | None:
    if not 1 <= len(parts) <= 2 or parts[0].nbytes != HEADER_BYTES:
        return None
    fields, check = parts[0][: _FIELDS.size], parts[0][_FIELDS.size :]
    magic, version, kind, dtype, *rest = _FIELDS.unpack(fields)
    if (magic, version) != (MAGIC, VERSION):
        return None
    if _CHECK.unpack(check)[0] != zlib.crc32(fields):
        if rest[0] == run:
            raise DamagedError("a message is damaged: its header's checksum does not fit")
        return None
    if kind not in list(Kind) or dtype >= len(_DTYPES):
        return None
    return Header(Kind(kind), dtype, *rest)


def dtype_number(x: Tensor) -> int:
    """The number that stands for a vector's dtype.

    Raises:
        ValueError: no message carries that dtype.
    """
    return _DTYPES.index(x.dtype)


def bytes_of(x: Tensor) -> memoryview:
    """A vector's bytes as they lie in memory; of those on a GPU, a copy's."""
    if not x.numel():
        return memoryview(b"")
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
