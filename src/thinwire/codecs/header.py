"""The header of 16 bytes in front of a payload: its codec, step and stage, whether it is valid, and a checksum."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

HEADER_BYTES = 16
_MAGIC = 0x636C
_FIELDS = struct.Struct("<HHIBBHf")
_MAX_SQUARED_NORM = 3.0e38  # it is stored in fp32
_NON_FINITE, _REJECTED, _SECOND_STAGE, _HAS_CHECKSUM = 1, 2, 4, 8


class Header(NamedTuple):
    """The fields of a header.

    Attributes:
        codec: a number for the codec and the size of the vector, from `codec_number`.
        step: the training step.
        second_stage: whether the payload is of the second stage, in which sums are sent back.
        non_finite: the sender's vector is not finite; the payload means nothing.
        rejected: the sender could not decode a payload that it received.
        squared_norm: the sum of squares of the sender's vector; in the second stage, of all ranks' vectors.
    """

    codec: int
    step: int
    second_stage: bool = False
    non_finite: bool = False
    rejected: bool = False
    squared_norm: float = 0.0


def codec_number(recipe: str, n: int) -> int:
    """A hash of 16 bits of a codec and a size, by which payloads of another codec are found."""
    return zlib.crc32(f"{recipe} of {n}".encode()) & 0xFFFF


def seal(payload: Tensor, header: Header) -> Tensor:
    """Prepend the header to a payload; uint8 on the payload's device."""
    if payload.is_meta:
        return payload.new_empty(HEADER_BYTES + payload.numel())
    payload = payload.contiguous().view(torch.uint8)
    flags = _NON_FINITE * header.non_finite | _REJECTED * header.rejected | _SECOND_STAGE * header.second_stage
    # On a GPU a checksum would cost a copy to the host for every message.
    has_checksum = payload.device.type == "cpu"
    # A NaN does not equal itself.
    squared_norm = min(header.squared_norm, _MAX_SQUARED_NORM) if header.squared_norm == header.squared_norm else 0.0
    packed = _FIELDS.pack(
        _MAGIC,
        header.codec,
        header.step & 0xFFFFFFFF,
        flags | (_HAS_CHECKSUM if has_checksum else 0),
        0,
        _checksum(payload) if has_checksum else 0,
        squared_norm,
    )
    front = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(payload.device)
    return torch.cat([front, payload])


def unseal(message: Tensor, expected: Header) -> tuple[Header, Tensor, str]:
    """Split a message into its header and payload, and check them.

    Args:
        message: from `seal`.
        expected: its codec, step and stage must be the message's.

    Returns:
        The header, the payload, and what is wrong with them as text, which is empty if nothing is.
    """
    payload = message[HEADER_BYTES:].clone()  # in memory of its own, so that fp32 scales are aligned to four bytes
    if message.is_meta:
        return expected, payload, ""
    magic, codec, step, flags, _, checksum, squared_norm = _FIELDS.unpack(bytes(message[:HEADER_BYTES].tolist()))
    header = Header(
        codec, step, bool(flags & _SECOND_STAGE), bool(flags & _NON_FINITE), bool(flags & _REJECTED), squared_norm
    )
    problem = ""
    if magic != _MAGIC:
        problem = "is no payload of a codec"
    elif header.second_stage != expected.second_stage:
        problem = f"is of stage {1 + header.second_stage}, not of stage {1 + expected.second_stage}"
    elif step != expected.step & 0xFFFFFFFF:
        problem = f"is of step {step}, not of step {expected.step}"
    elif codec != expected.codec:
        problem = "is of another codec, or of a vector of another size"
    elif flags & _HAS_CHECKSUM and payload.device.type == "cpu" and checksum != _checksum(payload):
        problem = "is damaged: its checksum does not fit"
    return header, payload, problem


def _checksum(payload: Tensor) -> int:
    return zlib.crc32(payload.numpy().data) & 0xFFFF
