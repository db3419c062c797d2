"""Means of compressed vectors whose residuals are updated only if every rank's vector was finite.

A mean of two stages starts its second one when the next mean is launched, so that of many parts of a gradient only the
last has its second stage after the backward pass. All means in flight on one comm are finished together, when the first
of them is waited for: a training step is skipped as a whole or not at all. Ranks launch and wait in the same order, so
these moments are the same on all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, encode_or_meta, norm_if_finite, payload_like, worker_key
from thinwire.codecs.feedback import residual_of, server_residual_of
from thinwire.codecs.header import HEADER_BYTES, Header, codec_number, seal, unseal
from thinwire.comm.base import Comm
from thinwire.comm.work import Work
from thinwire.errors import CommError


@dataclass(frozen=True)
class Residuals:
    """Where a mean keeps its residuals.

    Attributes:
        state: of the codec.
        offset: where the vector begins in the one that the residual is kept for.
        length: elements of that one; None if it is the vector itself.
    """

    state: State
    offset: int = 0
    length: int | None = None


class StagedMean(ABC):
    """A mean in flight.

    Attributes:
        square: once finished, the sum over ranks of the squares of their vectors' elements, if it is known.
    """

    square: float = 0.0

    def start_second_stage(self) -> None:
        """Wait for the first stage and start the second, if there is one."""

    @abstractmethod
    def all_finite(self) -> bool:
        """Wait for the first stage; whether all ranks' vectors are finite, which is the same answer on all ranks."""

    @abstractmethod
    def commit(self, finite: bool) -> None:
        """Update the residuals, if all vectors of all means in flight are finite."""

    @abstractmethod
    def result(self) -> Tensor:
        """Wait for the second stage; the mean."""


_IN_FLIGHT: WeakKeyDictionary[Comm, list[StagedMean]] = WeakKeyDictionary()


def launched(comm: Comm, mean: StagedMean) -> Work[Tensor]:
    """Add a mean to those in flight on the comm; the work's `wait` finishes all of them."""
    in_flight = _IN_FLIGHT.setdefault(comm, [])
    if in_flight:
        in_flight[-1].start_second_stage()
    in_flight.append(mean)

    def finish() -> Tensor:
        # Whichever mean is waited for first finishes them all; the others then only fetch their result.
        if mean in _IN_FLIGHT.get(comm, ()):
            together = _IN_FLIGHT.pop(comm)
            together[-1].start_second_stage()
            finite = [each.all_finite() for each in together]
            for each in together:
                each.commit(all(finite))
        return mean.result()

    return Work(finish)


class LinearMean(StagedMean):
    """A mean of payloads that an all-reduce adds, with each worker's residual.

    Args:
        comm: the ranks.
        x: becomes the mean.
        codec: linear.
        residuals: where the worker's is kept.
        key: of the random draws, equal on all ranks.
        count: the divisor of the sum.
    """

    def __init__(self, comm: Comm, x: Tensor, codec: Codec, residuals: Residuals, key: int, count: int) -> None:
        self._x, self._codec, self._key = x, codec, key
        # `size` workers subtract this part of the mean each, which is `count` means in all: the sum.
        self._weight = count / comm.size
        self._residual = residual_of(residuals.state, x, residuals.offset, residuals.length)
        self._updated = as_single(x)  # becomes the new residual
        if not norm_if_finite(x)[0]:
            # NaN in the payload makes the sum NaN on all ranks, so no flag has to be sent.
            payload = encode_or_meta(codec, torch.zeros_like(self._updated), key).fill_(torch.nan)
        elif codec.residual_after_sum:
            payload = codec.encode(self._updated.add_(self._residual), {}, key)
        else:
            payload = codec.encode_with_residual_(self._updated, self._residual, key)
        self._work = comm.all_reduce_(payload).then(lambda total: total.div_(count))

    def all_finite(self) -> bool:
        """Whether the sum is finite."""
        payload = self._work.wait()
        return payload.is_meta or bool(payload.isfinite().all())

    def commit(self, finite: bool) -> None:
        """Decode the mean and update the residual."""
        if not finite:
            self._x.fill_(torch.nan)
            return
        mean = self._codec.decode(self._work.wait(), self._updated, self._key)
        if self._codec.residual_after_sum:
            self._updated.sub_(mean, alpha=self._weight)
        # The residual first: `_updated` shares memory with `x` where `x` is in fp32.
        self._residual.copy_(self._updated)
        self._x.copy_(mean)

    def result(self) -> Tensor:
        """The mean; there is no second stage."""
        return self._x


class TwoStageMean(StagedMean):
    """A compressed reduce-scatter, then an all-gather of the compressed sums.

    Args:
        comm: the ranks.
        x: becomes the mean.
        codec: with payloads of bytes.
        residuals: where they are kept; None for no error feedback.
        key: of the random draws, equal on all ranks.
        count: the divisor of sums.
        server: the codec of the second stage; the first one's unless given.
    """

    def __init__(
        self,
        comm: Comm,
        x: Tensor,
        codec: Codec,
        residuals: Residuals | None,
        key: int,
        count: int,
        *,
        server: Codec | None = None,
    ) -> None:
        self._comm, self._x, self._codec, self._key, self._count = comm, x, codec, key, count
        self._server = server or codec
        # Cut where blocks of both codecs begin, so that no block is split between servers.
        self._cuts = pieces(x.numel(), comm.size, lcm(codec.alignment, self._server.alignment))
        self._own = self._cuts[comm.rank]
        recipe = repr(codec) if server is None else f"{codec} and {server}"
        # The step of the launch: the waits may belong to a later step.
        self._number, self._step = codec_number(recipe, x.numel()), comm.step
        self._updated = as_single(x)  # becomes the worker's new residual, and later holds the decoded mean
        self._residual = self._server_residual = None
        if residuals is not None:
            self._residual = residual_of(residuals.state, x, residuals.offset, residuals.length)
            self._server_residual = server_residual_of(residuals.state, x, self._own, residuals.offset, count)
        self._problem = ""
        self._second_stage: Work[list[Tensor]]
        self._updated_server: Tensor
        # The first stage: the codes of each piece to the rank that adds that piece.
        finite, square = norm_if_finite(x)
        header = Header(self._number, self._step, non_finite=not finite, squared_norm=square)
        messages = [seal(payload, header) for payload in self._encode_pieces(finite)]
        nbytes = HEADER_BYTES + codec.nbytes(_length(self._own))
        self._first_stage = comm.all_to_all(messages, [nbytes] * comm.size)

    def _encode_pieces(self, finite: bool) -> list[Tensor]:
        if not finite or self._x.is_meta:
            return [payload_like(self._x, self._codec.nbytes(_length(cut))).zero_() for cut in self._cuts]
        # Draws of its own for each piece, which the server of that piece can repeat (dither).
        keys = [self._worker_key(self._comm.rank, piece) for piece in range(len(self._cuts))]
        if self._residual is not None:
            return self._codec.encode_pieces_with_residual_(self._updated, self._residual, self._cuts, keys)
        return [self._codec.encode(self._updated[cut], {}, key) for cut, key in zip(self._cuts, keys, strict=True)]

    def start_second_stage(self) -> None:
        """Add all ranks' codes of this rank's piece, encode the mean and send it to all ranks.

        A payload that cannot be decoded is reported to all ranks, which raise together.
        """
        headers, payloads = self._unseal(self._first_stage.wait(), self._codec, second_stage=False)
        self.square = sum(header.squared_norm for header in headers)
        self._finite = not any(header.non_finite for header in headers)
        # An all-gather needs payloads of one size, that of the first piece, which is the longest.
        message = payload_like(self._x, self._server.nbytes(_length(self._cuts[0]))).zero_()
        if self._finite and not self._problem and not self._x.is_meta:
            keys = [self._worker_key(rank, self._comm.rank) for rank in range(self._comm.size)]
            mean = self._codec.decode_sum(payloads, self._updated[self._own], keys).div_(self._count)
            key = self._server_key(self._comm.rank)
            if self._server_residual is None:
                payload = self._server.encode(mean, {}, key)
            else:
                payload = self._server.encode_with_residual_(mean, self._server_residual, key)
                self._updated_server = mean
            payload = payload.view(torch.uint8)
            message[: payload.numel()].copy_(payload)
        header = Header(
            self._number,
            self._step,
            second_stage=True,
            non_finite=not self._finite,
            rejected=bool(self._problem),
            squared_norm=self.square,
        )
        self._second_stage = self._comm.all_gather(seal(message, header))

    def all_finite(self) -> bool:
        """Whether all ranks' vectors are finite, by the headers of the first stage."""
        return self._finite

    def commit(self, finite: bool) -> None:
        """Update the residuals of this rank as a worker and as a server."""
        self._all_finite = finite
        if not finite or self._problem or self._x.is_meta or self._residual is None or self._server_residual is None:
            return
        self._residual.copy_(self._updated)
        self._server_residual.copy_(self._updated_server)

    def result(self) -> Tensor:
        """Decode all pieces."""
        headers, payloads = self._unseal(self._second_stage.wait(), self._server, second_stage=True)
        rejecting = [rank for rank, header in enumerate(headers) if header.rejected]
        if self._problem or rejecting:
            reported = f"rank {rejecting[0]} could not decode a payload" if rejecting else ""
            raise CommError(
                f"rank {self._comm.rank}, step {self._step}, compressed mean: {self._problem or reported}; "
                "all ranks must run the same recipe and be at the same step"
            )
        if not self._all_finite:
            return self._x.fill_(torch.nan)
        if not self._x.is_meta:
            for rank, (cut, payload) in enumerate(zip(self._cuts, payloads, strict=True)):
                own = payload[: self._server.nbytes(_length(cut)) // payload.element_size()]
                self._server.decode_(own, self._updated[cut], self._server_key(rank))
            if self._updated.data_ptr() != self._x.data_ptr():  # `x` is not in fp32, or not contiguous
                self._x.copy_(self._updated)
        return self._x

    def _unseal(
        self, messages: Sequence[Tensor], codec: Codec, *, second_stage: bool
    ) -> tuple[list[Header], list[Tensor]]:
        """The headers and payloads of all ranks' messages; the first problem is kept for `result`."""
        expected = Header(self._number, self._step, second_stage=second_stage)
        opened = [unseal(message, expected) for message in messages]
        for rank, (_, _, problem) in enumerate(opened):
            if problem and not self._problem:
                self._problem = f"what rank {rank} sent {problem}"
        return [header for header, _, _ in opened], [payload.view(codec.dtype) for _, payload, _ in opened]

    def _worker_key(self, rank: int, piece: int) -> int:
        return worker_key(self._key, rank, self._comm.size, piece)

    def _server_key(self, rank: int) -> int:
        # Pieces from `size` on are no worker's, so that servers draw independently of workers.
        return worker_key(self._key, 0, 1, self._comm.size + rank)


def pieces(n: int, size: int, alignment: int) -> list[slice]:
    """Cut a vector of n elements into `size` pieces, end to end at multiples of `alignment`; the last are shorter."""
    length = -(-n // (size * alignment)) * alignment
    return [slice(min(rank * length, n), min((rank + 1) * length, n)) for rank in range(size)]


def _length(cut: slice) -> int:
    return cut.stop - cut.start
