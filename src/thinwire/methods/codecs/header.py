# SPDX-License-Identifier: Apache-2.0
"""The 16-byte header of a payload: its codec, step and stage, validity flags, and a checksum.

The checksum is a CRC-32 of the header and the payload. On a GPU it covers the header only, so that the payload need not
be copied to the host.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.kernels import bytes_of, join

HEADER_BYTES = 16
_MAGIC = 0xC7
_FIELDS = struct.Struct("<BBHIf")
_CHECK = struct.Struct("<I")
_MAX_SQUARED_NORM = 3.0e38  # it is stored in fp32
_NON_FINITE, _REJECTED, _SECOND_STAGE, _PAYLOAD_IS_CHECKED = 1, 2, 4, 8


class Header(NamedTuple):
    """The fields of a header.

    Attributes:
        codec: the number of the codec and the vector's size, from `codec_number`.
        step: the training step.
        second_stage: whether the payload belongs to the second stage, in which sums are sent back.
        non_finite: whether the sender's vector, or in the second stage one that it received, is not finite; the payload
            is then meaningless.
        rejected: whether the sender could not decode a received payload.
        squared_norm: the sum of squares of the sender's vector; in the second stage, of all ranks' vectors.
    """

    codec: int
    step: int
    second_stage: bool = False
    non_finite: bool = False
    rejected: bool = False
    squared_norm: float = 0.0


def codec_number(recipe: str, n: int) -> int:
    """Hash a codec and a size to 16 bits, to detect payloads of another codec."""
    return zlib.crc32(f"{recipe} of {n}".encode()) & 0xFFFF


def seal(payload: Tensor, header: Header) -> Tensor:
    """Prepend the header to a payload; the result is uint8 on the payload's device."""
    payload = payload.contiguous().view(torch.uint8)
    front = torch.frombuffer(bytearray(_packed(header, payload)), dtype=torch.uint8).to(payload.device)
    return join([front, payload])


def unseal(message: Tensor, expected: Header) -> tuple[Header, Tensor, str]:
    """Split a message into its header and payload, and check them.

    Args:
        message: the result of `seal`.
        expected: the header with the expected codec, step and stage.

    Returns:
        The header, the payload, and the problem as text, empty if there is none.
    """
    (opened,) = _opened([message], expected)
    return opened


def unseal_all(
    messages: Sequence[Tensor], expected: Header, dtype: torch.dtype, name: Callable[[int], str]
) -> tuple[list[Header], list[Tensor], str]:
    """Return the headers of all ranks' messages, their payloads, and the first problem.

    Args:
        messages: results of `seal`, in rank order.
        expected: the header with the expected codec, step and stage.
        dtype: the dtype of the payloads.
        name: returns the name of a rank, for the problem.
    """
    opened = _opened(messages, expected)
    problems = (f"the message of {name(rank)} {problem}" for rank, (_, _, problem) in enumerate(opened) if problem)
    return [header for header, _, _ in opened], [payload.view(dtype) for _, payload, _ in opened], next(problems, "")


def _opened(messages: Sequence[Tensor], expected: Header) -> list[tuple[Header, Tensor, str]]:
    """Unseal each message; all headers are read at once, since on a GPU each read waits for the device."""
    if_meta = _packed(expected, torch.empty(0, dtype=torch.float32, device="meta")) * len(messages)
    fronts = bytes_of(join([message[:HEADER_BYTES] for message in messages]), if_meta=if_meta)
    opened: list[tuple[Header, Tensor, str]] = []
    for i, message in enumerate(messages):
        front = fronts[i * HEADER_BYTES : (i + 1) * HEADER_BYTES]
        fields, (checksum,) = front[: _FIELDS.size], _CHECK.unpack(front[_FIELDS.size :])
        magic, flags, codec, step, squared_norm = _FIELDS.unpack(fields)
        payload = message[HEADER_BYTES:]
        if payload.storage_offset() % 4:
            payload = payload.clone()  # so that fp32 scales are aligned to four bytes
        header = Header(
            codec, step, bool(flags & _SECOND_STAGE), bool(flags & _NON_FINITE), bool(flags & _REJECTED), squared_norm
        )
        problem = ""
        if magic != _MAGIC:
            problem = "is not a payload of a codec"
        elif checksum != _checksum(fields, payload if flags & _PAYLOAD_IS_CHECKED else None):
            problem = "is damaged: its checksum does not match"
        elif header.second_stage != expected.second_stage:
            problem = f"is of stage {1 + header.second_stage}, not of stage {1 + expected.second_stage}"
        elif step != expected.step & 0xFFFFFFFF:
            problem = f"is of step {step}, not of step {expected.step}"
        elif codec != expected.codec:
            problem = "is of another codec, or of a vector of another size"
        opened.append((header, payload, problem))
    return opened


def _packed(header: Header, payload: Tensor) -> bytes:
    flags = _NON_FINITE * header.non_finite | _REJECTED * header.rejected | _SECOND_STAGE * header.second_stage
    on_host = payload.device.type == "cpu"
    # A NaN does not equal itself.
    squared_norm = min(header.squared_norm, _MAX_SQUARED_NORM) if header.squared_norm == header.squared_norm else 0.0
    fields = _FIELDS.pack(
        _MAGIC, flags | _PAYLOAD_IS_CHECKED * on_host, header.codec, header.step & 0xFFFFFFFF, squared_norm
    )
    return fields + _CHECK.pack(_checksum(fields, payload if on_host else None))


def _checksum(fields: bytes, payload: Tensor | None) -> int:
    """Compute the CRC-32 of a header's fields, and of the payload if it is on the host."""
    start = zlib.crc32(fields)
    return start if payload is None or payload.device.type != "cpu" else zlib.crc32(payload.numpy().data, start)
