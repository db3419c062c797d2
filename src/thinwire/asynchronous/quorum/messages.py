# SPDX-License-Identifier: Apache-2.0
"""The messages between ranks: small control messages, and chunks of gradients and states."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

_FIELDS = 6
_HEADER = 4
HEADER_BYTES = 8 * _HEADER


class Kind(IntEnum):
    """The purpose of a control message."""

    READY = 0  # to the coordinator: my gradient of this step is ready; repeated while the sender waits
    ACK = 1  # to the coordinator: I have the mean of this attempt
    START = 2  # to members: average the gradients of these members
    COMMIT = 3  # to all ranks that are ready: the step is decided, with these members
    LATE = 4  # to one rank: its step is already committed; these are the members of the latest step
    REFUSED = 5  # to all ranks that are ready: the optimizers of these two ranks have different settings
    STATE_REQUEST = 6  # to a member: send me the state of this step or of a later one
    BARRIER = 7  # to all ranks: I have ended a step, and wait until all ranks have


class ControlMessage(NamedTuple):
    """A control message.

    Attributes:
        kind: its purpose.
        step: the training step.
        attempt: the attempt at that step; in BARRIER, its number, from 1.
        digest: the digest of the optimizer's settings.
        microseconds: the computation time of the gradient.
        answers: in LATE, the step that it answers.
        members: the member ranks.
    """

    kind: Kind
    step: int
    attempt: int = 0
    digest: int = 0
    microseconds: int = 0
    answers: int = 0
    members: tuple[int, ...] = ()

    def encode(self, size: int) -> Tensor:
        """Encode as `control_length(size)` int64 numbers; members are one flag per rank."""
        flags = [0] * size
        for rank in self.members:
            flags[rank] = 1
        return torch.tensor([*self[:_FIELDS], *flags], dtype=torch.int64, device="cpu")


def decode_control(numbers: Sequence[int]) -> ControlMessage:
    """Decode a control message."""
    kind, step, attempt, digest, microseconds, answers = numbers[:_FIELDS]
    members = tuple(rank for rank, flag in enumerate(numbers[_FIELDS:]) if flag)
    return ControlMessage(Kind(kind), step, attempt, digest, microseconds, answers, members)


def control_length(size: int) -> int:
    """Return the count of numbers in a control message among `size` ranks."""
    return _FIELDS + size


class GradientChunk(NamedTuple):
    """One part of a gradient vector.

    Attributes:
        step: the training step.
        attempt: the attempt at that step.
        part: the index of the part.
        reduced: 1 for the mean of the members, 0 for one rank's own part.
        content: the elements; bytes after `decode_gradient_chunk`.
    """

    step: int
    attempt: int
    part: int
    reduced: int
    content: Tensor


class StateChunk(NamedTuple):
    """One part of a rank's packed state.

    Attributes:
        step: the step of the state.
        chunks: the number of chunks of this state.
        number: the number of this chunk, from 0.
        nbytes: the bytes of the whole state.
        content: its bytes.
    """

    step: int
    chunks: int
    number: int
    nbytes: int
    content: Tensor


def encode_chunk(chunk: GradientChunk | StateChunk, capacity: int) -> Tensor:
    """Encode header and content in `HEADER_BYTES + capacity` bytes on the CPU, padded with zeros."""
    message = torch.zeros(HEADER_BYTES + capacity, dtype=torch.uint8, device="cpu")
    message[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(chunk[:_HEADER], dtype=torch.int64, device="cpu"))
    data = chunk.content.detach().contiguous().view(-1).view(torch.uint8)
    message[HEADER_BYTES : HEADER_BYTES + data.numel()].copy_(data)
    return message


def decode_gradient_chunk(message: Tensor) -> GradientChunk:
    """Decode a chunk; its content shares the message's memory."""
    return GradientChunk(*_header(message), message[HEADER_BYTES:])


def decode_state_chunk(message: Tensor) -> StateChunk:
    """Decode a chunk; its content shares the message's memory."""
    return StateChunk(*_header(message), message[HEADER_BYTES:])


def _header(message: Tensor) -> tuple[int, int, int, int]:
    # A received frame may not be aligned to 8 bytes, which int64 views require, so it is cloned.
    first, second, third, fourth = message[:HEADER_BYTES].clone().view(torch.int64).tolist()
    return first, second, third, fourth
