"""Sixteen bytes in front of a payload, that say whose, of which step, and whether all is well."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

HEADER_BYTES = 16
_MAGIC = 0x636C
_FIELDS = struct.Struct("<HHIBBHf")
_LARGEST = 3.0e38  # for squares, which are fp32 in a header
_SPOILT, _REFUSED, _ANSWER, _SUMMED = 1, 2, 4, 8


class Header(NamedTuple):
    """What a payload is.

    Attributes:
        codec: a number for the codec and the size of the vector, from `codec_number`.
        step: the training step.
        answer: whether this is the second stage, in which sums go back.
        spoilt: the sender's vector is not finite; the payload means nothing.
        refused: the sender could not read what it had been sent.
        square: the sum of squares of the sender's vector; in an answer, of all of them.
    """

    codec: int
    step: int
    answer: bool = False
    spoilt: bool = False
    refused: bool = False
    square: float = 0.0


def codec_number(recipe: str, n: int) -> int:
    """A number of 16 bits for a codec and a size, so that foreign payloads are noticed."""
    return zlib.crc32(f"{recipe} of {n}".encode()) & 0xFFFF


def seal(payload: Tensor, header: Header) -> Tensor:
    """The message: header and payload, in uint8 on the payload's device."""
    if payload.is_meta:
        return payload.new_empty(HEADER_BYTES + payload.numel())
    payload = payload.contiguous().view(torch.uint8)
    flags = _SPOILT * header.spoilt | _REFUSED * header.refused | _ANSWER * header.answer
    summed = payload.device.type == "cpu"
    square = min(header.square, _LARGEST) if header.square == header.square else 0.0
    packed = _FIELDS.pack(
        _MAGIC,
        header.codec,
        header.step & 0xFFFFFFFF,
        flags | (_SUMMED if summed else 0),
        0,
        _checksum(payload) if summed else 0,
        square,
    )
    front = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(payload.device)
    return torch.cat([front, payload])


def unseal(message: Tensor, expected: Header) -> tuple[Header, Tensor, str]:
    """The header, the payload, and what is wrong with them in words, which is nothing as a rule.

    Args:
        message: from `seal`.
        expected: its codec, step and stage must be the message's.
    """
    payload = message[HEADER_BYTES:].clone()  # on its own, so that scales lie at multiples of four bytes
    if message.is_meta:
        return expected, payload, ""
    magic, codec, step, flags, _, checksum, square = _FIELDS.unpack(bytes(message[:HEADER_BYTES].tolist()))
    header = Header(codec, step, bool(flags & _ANSWER), bool(flags & _SPOILT), bool(flags & _REFUSED), square)
    if magic != _MAGIC:
        return header, payload, "is no payload of a codec"
    if header.answer != expected.answer:
        return header, payload, f"is of stage {1 + header.answer}, not of stage {1 + expected.answer}"
    if step != expected.step & 0xFFFFFFFF:
        return header, payload, f"is of step {step}, not of step {expected.step}"
    if codec != expected.codec:
        return header, payload, "is of another codec, or of a vector of another size"
    if flags & _SUMMED and payload.device.type == "cpu" and checksum != _checksum(payload):
        return header, payload, "is damaged: its checksum does not fit"
    return header, payload, ""


def _checksum(payload: Tensor) -> int:
    return zlib.crc32(payload.numpy().data) & 0xFFFF
