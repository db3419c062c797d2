# SPDX-License-Identifier: Apache-2.0
"""The 16-byte header of a payload: its codec, step and stage, validity flags, and a checksum.

The checksum is a CRC-32 of the header and the payload. On a GPU it covers the header only, so that the payload need not
be copied to the host. Flags that are computed on a GPU stay there: the header is chosen there from one for each value
of the flags, and the receiver's GPU compares it with those that it expects. Only an error is read on the host.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.kernels import Flag, join
from thinwire.core.kernels.decisions import to_device
from thinwire.errors import CommError

HEADER_BYTES = 16
_MAGIC = 0xC7
_FIELDS = struct.Struct("<BBHI4x")
_CHECK = struct.Struct("<I")
_NON_FINITE, _REJECTED, _SECOND_STAGE, _PAYLOAD_IS_CHECKED = 1, 2, 4, 8


class Header(NamedTuple):
    """The fields of a header.

    Attributes:
        codec: the number of the codec and the vector's size, from `codec_number`.
        step: the training step.
        second_stage: whether the payload belongs to the second stage, in which sums are sent back.
        finite: whether the sender's vector, and in the second stage all that it received, is finite; otherwise the
            payload is meaningless.
        accepted: whether the sender could decode all payloads that it received.
    """

    codec: int
    step: int
    second_stage: bool = False
    finite: Flag = True
    accepted: Flag = True


class Opened(NamedTuple):
    """The messages of all ranks, without their headers.

    Attributes:
        payloads: the payloads, in rank order.
        valid: whether all messages fit what this rank expects, and all ranks could decode what they received.
        usable: whether all messages are valid, and all vectors finite.
        problem: returns the first problem as text; empty if there is none.
    """

    payloads: list[Tensor]
    valid: Flag
    usable: Flag
    problem: Callable[[], str]

    def refuse(self, where: str) -> None:
        """Raise an error if there is a problem.

        Raises:
            CommError: with the rank, the step and the call in `where`.
        """
        if problem := self.problem():
            raise CommError(f"{where}: {problem}. All ranks must run the same recipe and be at the same step")


def codec_number(recipe: str, n: int) -> int:
    """Hash a codec and a size to 16 bits, to detect payloads of another codec."""
    return zlib.crc32(f"{recipe} of {n}".encode()) & 0xFFFF


def seal(payload: Tensor, header: Header) -> Tensor:
    """Prepend the header to a payload; the result is uint8 on the payload's device."""
    return seal_each([payload], header)[0]


def seal_each(payloads: list[Tensor], header: Header) -> list[Tensor]:
    """Prepend the same header to each payload, and drop each payload after that."""
    payloads[:] = [payload.contiguous().view(torch.uint8) for payload in payloads]
    if payloads[0].device.type == "cpu":  # there each header has its payload's checksum
        fronts = [_front(header, payload) for payload in payloads]
    else:
        fronts = [_front(header, payloads[0])] * len(payloads)
    messages = list[Tensor]()
    for front in fronts:
        messages.append(torch.cat([front, payloads.pop(0)]))
    return messages


def unseal(message: Tensor, expected: Header) -> tuple[Header, Tensor, str]:
    """Split a message into its header and payload, and check them.

    Args:
        message: the result of `seal`.
        expected: the header with the expected codec, step and stage.

    Returns:
        The header, the payload, and the problem as text, empty if there is none.
    """
    if message.is_meta:
        return expected, _payload_of(message), ""
    header, problem = _read(bytes(message[:HEADER_BYTES].tolist()), message, expected)
    return header, _payload_of(message), problem


def unseal_all(messages: Sequence[Tensor], expected: Header, dtype: torch.dtype, name: Callable[[int], str]) -> Opened:
    """Return the payloads of all ranks' messages, and what their headers say.

    Args:
        messages: results of `seal`, in rank order.
        expected: the header with the expected codec, step and stage.
        dtype: the dtype of the payloads.
        name: returns the name of a rank, for the problem.
    """
    if messages[0].device.type in ("cpu", "meta"):
        opened = [unseal(message, expected) for message in messages]
        payloads = [payload.view(dtype) for _, payload, _ in opened]
        problem = _first_problem([(header, text) for header, _, text in opened], name)
        usable = not problem and all(header.finite for header, _, _ in opened)
        return Opened(payloads, not problem, usable, lambda: problem)
    payloads = [_payload_of(message).view(dtype) for message in messages]
    fronts = join([message[:HEADER_BYTES] for message in messages])

    def describe() -> str:
        rows = fronts.view(-1, HEADER_BYTES).tolist()
        return _first_problem([_read(bytes(row), fronts, expected) for row in rows], name)

    equal = (fronts.view(-1, 1, HEADER_BYTES) == _fronts(expected, fronts)[2:]).all(2)
    return Opened(payloads, equal.any(1).all(), equal[:, 1].all(), describe)


def _payload_of(message: Tensor) -> Tensor:
    payload = message[HEADER_BYTES:]
    # A copy if fp32 scales would not be aligned to four bytes.
    return payload.clone() if payload.storage_offset() % 4 else payload


def _first_problem(opened: Sequence[tuple[Header, str]], name: Callable[[int], str]) -> str:
    for rank, (_, problem) in enumerate(opened):
        if problem:
            return f"the message of {name(rank)} {problem}"
    rejected = (rank for rank, (header, _) in enumerate(opened) if not header.accepted)
    return next((f"{name(rank)} could not decode a payload" for rank in rejected), "")


def _read(front: bytes, message: Tensor, expected: Header) -> tuple[Header, str]:
    """Read a header; return it, and the problem as text."""
    fields, (checksum,) = front[: _FIELDS.size], _CHECK.unpack(front[_FIELDS.size :])
    magic, flags, codec, step = _FIELDS.unpack(fields)
    header = Header(codec, step, bool(flags & _SECOND_STAGE), not flags & _NON_FINITE, not flags & _REJECTED)
    problem = ""
    if magic != _MAGIC:
        problem = "is not a payload of a codec"
    elif checksum != _checksum(fields, message[HEADER_BYTES:] if flags & _PAYLOAD_IS_CHECKED else None):
        problem = "is damaged: its checksum does not match"
    elif header.second_stage != expected.second_stage:
        problem = f"is of stage {1 + header.second_stage}, not of stage {1 + expected.second_stage}"
    elif step != expected.step & 0xFFFFFFFF:
        problem = f"is of step {step}, not of step {expected.step}"
    elif codec != expected.codec:
        problem = "is of another codec, or of a vector of another size"
    return header, problem


def _front(header: Header, payload: Tensor) -> Tensor:
    """Return the header of a payload as a tensor, on the payload's device."""
    if isinstance(header.finite, bool) and isinstance(header.accepted, bool):
        front = _bytes(_packed(header, payload))
        return front if payload.device.type == "cpu" else to_device(front, payload.device)
    which = torch.zeros(1, dtype=torch.int64, device=payload.device)
    which += header.finite
    which += 2 * header.accepted
    return _fronts(header, payload).index_select(0, which).view(-1)


def _fronts(header: Header, like: Tensor) -> Tensor:
    """Return the header for each value of its flags, [4, 16]: finite if the index is odd, accepted from 2 on."""
    rows = (
        _packed(header._replace(finite=finite, accepted=accepted), like)
        for accepted in (False, True)
        for finite in (False, True)
    )
    return to_device(_bytes(b"".join(rows)), like.device).view(4, HEADER_BYTES)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _packed(header: Header, payload: Tensor) -> bytes:
    flags = _NON_FINITE * (not header.finite) | _REJECTED * (not header.accepted) | _SECOND_STAGE * header.second_stage
    on_host = payload.device.type == "cpu"
    fields = _FIELDS.pack(_MAGIC, flags | _PAYLOAD_IS_CHECKED * on_host, header.codec, header.step & 0xFFFFFFFF)
    return fields + _CHECK.pack(_checksum(fields, payload if on_host else None))


def _checksum(fields: bytes, payload: Tensor | None) -> int:
    """Compute the CRC-32 of a header's fields, and of the payload if it is on the host."""
    start = zlib.crc32(fields)
    return start if payload is None or payload.device.type != "cpu" else zlib.crc32(payload.numpy().data, start)
