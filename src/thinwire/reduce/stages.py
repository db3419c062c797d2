"""Means that need more than one look: coded sums whose errors are kept only if every rank's vector was finite.

A mean of two stages goes into its second when the next one has been launched, so that of many parts only the last has
a stage to itself. All that are under way on one comm are settled together, when the first of them is waited for: a step
is skipped as a whole or not at all. Ranks launch and wait in one order, so these are the same moments on all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, encoded, norm_if_finite, payload_like, worker_key
from thinwire.codecs.feedback import error_of, server_error_of
from thinwire.codecs.header import HEADER_BYTES, Header, codec_number, seal, unseal
from thinwire.comm.base import Comm
from thinwire.comm.work import Work
from thinwire.errors import CommError


@dataclass(frozen=True)
class Errors:
    """Where a mean keeps what it leaves unsaid.

    Attributes:
        state: holds it by name.
        at: where the vector begins in the one that errors are kept for.
        whole: elements of that one; None where they are the same.
    """

    state: State
    at: int = 0
    whole: int | None = None


class StagedMean(ABC):
    """A mean on its way.

    Attributes:
        square: once settled, the sum over ranks of the squares of their vectors' elements, where those are known.
    """

    square: float = 0.0

    def start_second_stage(self) -> None:
        """Another one has been launched: wait for the first stage and start the second, where there is one."""

    @abstractmethod
    def all_finite(self) -> bool:
        """Wait for the first stage; whether all ranks' vectors are finite, which all of them answer alike."""

    @abstractmethod
    def commit(self, fine: bool) -> None:
        """Keep the errors if all is fine."""

    @abstractmethod
    def result(self) -> Tensor:
        """Wait for the second stage; the mean."""


_UNDER_WAY: WeakKeyDictionary[Comm, list[StagedMean]] = WeakKeyDictionary()


def launched(comm: Comm, mean: StagedMean) -> Work[Tensor]:
    """The message that a staged mean is, among all that are under way on the comm."""
    under_way = _UNDER_WAY.setdefault(comm, [])
    if under_way:
        under_way[-1].start_second_stage()
    under_way.append(mean)

    def finish() -> Tensor:
        if mean in _UNDER_WAY.get(comm, ()):
            together = _UNDER_WAY.pop(comm)
            together[-1].start_second_stage()
            finite = [each.all_finite() for each in together]
            for each in together:
                each.commit(all(finite))
        return mean.result()

    return Work(finish)


class LinearMean(StagedMean):
    """A sum of payloads by the wire, and what each worker left out of its own.

    Args:
        comm: the ranks.
        x: becomes the mean.
        codec: linear.
        errors: where the worker's is kept.
        key: of the random draws, equal on all ranks.
        count: what the sum is divided by.
    """

    def __init__(self, comm: Comm, x: Tensor, codec: Codec, errors: Errors, key: int, count: int) -> None:
        self._x, self._codec, self._key = x, codec, key
        self._share = count / comm.size
        self._residual = error_of(errors.state, x, errors.at, errors.whole)
        self._rest = as_single(x)
        finite, _ = norm_if_finite(x)
        payload = self._encode() if finite else encoded(codec, torch.zeros_like(self._rest), key).fill_(torch.nan)
        self._work = comm.all_reduce_(payload).then(lambda total: total.div_(count))

    def _encode(self) -> Tensor:
        if self._codec.residual_after_sum:
            return self._codec.encode(self._rest.add_(self._residual), {}, self._key)
        return self._codec.encode_with_residual_(self._rest, self._residual, self._key)

    def all_finite(self) -> bool:
        """Wait for the sum."""
        payload = self._work.wait()
        return payload.is_meta or bool(payload.isfinite().all())

    def commit(self, fine: bool) -> None:
        """Keep the error; of a codec that tells late, what the mean has not said."""
        if not fine:
            self._x.fill_(torch.nan)
            return
        mean = self._codec.decode(self._work.wait(), self._rest, self._key)
        if self._codec.residual_after_sum:
            self._rest.sub_(mean, alpha=self._share)
        self._residual.copy_(self._rest)
        self._x.copy_(mean)

    def result(self) -> Tensor:
        """There is no second stage."""
        return self._x


class TwoStageMean(StagedMean):
    """Pieces to those who add them up, and coded sums back to everyone.

    Args:
        comm: the ranks.
        x: becomes the mean.
        codec: whose payloads are bytes.
        errors: where what is left unsaid is kept; None forgets it.
        key: of the random draws, equal on all ranks.
        count: what sums are divided by.
        server: the codec of the second stage; the first one's unless given.
    """

    def __init__(
        self,
        comm: Comm,
        x: Tensor,
        codec: Codec,
        errors: Errors | None,
        key: int,
        count: int,
        *,
        server: Codec | None = None,
    ) -> None:
        self._comm, self._x, self._codec, self._key, self._count = comm, x, codec, key, count
        self._server = server or codec
        self._cuts = pieces(x.numel(), comm.size, lcm(codec.alignment, self._server.alignment))
        self._own = self._cuts[comm.rank]
        recipe = repr(codec) if server is None else f"{codec} and {server}"
        self._number, self._step = codec_number(recipe, x.numel()), comm.step
        self._rest = as_single(x)
        self._residual = self._server_residual = None
        if errors is not None:
            self._residual = error_of(errors.state, x, errors.at, errors.whole)
            self._server_residual = server_error_of(errors.state, x, self._own, errors.at, count)
        self._problem = ""
        self._gathered: Work[list[Tensor]]
        self._server_rest: Tensor
        self._scattered = self._scatter()

    # -- the first stage -----------------------------------------------------------------------------------------

    def _scatter(self) -> Work[list[Tensor]]:
        finite, square = norm_if_finite(self._x)
        header = Header(self._number, self._step, spoilt=not finite, square=square)
        messages = [seal(payload, header) for payload in self._payloads(finite)]
        nbytes = HEADER_BYTES + self._codec.nbytes(_length(self._own))
        return self._comm.all_to_all(messages, [nbytes] * self._comm.size)

    def _payloads(self, finite: bool) -> list[Tensor]:
        if not finite or self._x.is_meta:
            return [payload_like(self._x, self._codec.nbytes(_length(cut))).zero_() for cut in self._cuts]
        keys = [self._worker_key(self._comm.rank, piece) for piece in range(len(self._cuts))]
        if self._residual is not None:
            return self._codec.encode_pieces_with_residual_(self._rest, self._residual, self._cuts, keys)
        return [self._codec.encode(self._rest[cut], {}, key) for cut, key in zip(self._cuts, keys, strict=True)]

    def all_finite(self) -> bool:
        """What the first stage has told."""
        return self._finite

    # -- the second stage ----------------------------------------------------------------------------------------

    def start_second_stage(self) -> None:
        """Open everyone's codes of the own piece, add them up and send what they come to.

        A payload that cannot be read is reported to all.
        """
        headers, self._heard = self._opened(self._scattered.wait(), self._codec, answer=False)
        self.square = sum(header.square for header in headers)
        self._finite = not any(header.spoilt for header in headers)
        payload = payload_like(self._x, self._server.nbytes(_length(self._cuts[0]))).zero_()
        if self._finite and not self._problem and not self._x.is_meta:
            coded = self._mean_of_piece().view(torch.uint8)
            payload[: coded.numel()].copy_(coded)
        flags = {"answer": True, "spoilt": not self._finite, "refused": bool(self._problem)}
        self._gathered = self._comm.all_gather(
            seal(payload, Header(self._number, self._step, square=self.square, **flags))
        )

    def _mean_of_piece(self) -> Tensor:
        keys = [self._worker_key(rank, self._comm.rank) for rank in range(self._comm.size)]
        mean = self._codec.total(self._heard, self._rest[self._own], keys).div_(self._count)
        key = self._server_key(self._comm.rank)
        if self._server_residual is None:
            return self._server.encode(mean, {}, key)
        coded = self._server.encode_with_residual_(mean, self._server_residual, key)
        self._server_rest = mean
        return coded

    def commit(self, fine: bool) -> None:
        """Keep what this rank leaves unsaid as a worker and as a server."""
        self._fine = fine
        if not fine or self._problem or self._x.is_meta or self._residual is None or self._server_residual is None:
            return
        self._residual.copy_(self._rest)
        self._server_residual.copy_(self._server_rest)

    def result(self) -> Tensor:
        """Decode everyone's piece."""
        headers, payloads = self._opened(self._gathered.wait(), self._server, answer=True)
        refusing = [rank for rank, header in enumerate(headers) if header.refused]
        if self._problem or refusing:
            told = f"rank {refusing[0]} could not read a payload" if refusing else ""
            raise CommError(
                f"rank {self._comm.rank}, step {self._step}, coded mean: {self._problem or told}; "
                "all ranks must run the same recipe and be at the same step"
            )
        if not self._fine:
            return self._x.fill_(torch.nan)
        if not self._x.is_meta:
            for rank, (cut, payload) in enumerate(zip(self._cuts, payloads, strict=True)):
                coded = payload[: self._server.nbytes(_length(cut)) // payload.element_size()]
                self._server.decode_(coded, self._rest[cut], self._server_key(rank))
            if self._rest.data_ptr() != self._x.data_ptr():
                self._x.copy_(self._rest)
        return self._x

    def _opened(self, messages: Sequence[Tensor], codec: Codec, *, answer: bool) -> tuple[list[Header], list[Tensor]]:
        expected = Header(self._number, self._step, answer=answer)
        opened = [unseal(message, expected) for message in messages]
        for rank, (_, _, problem) in enumerate(opened):
            if problem and not self._problem:
                self._problem = f"what rank {rank} sent {problem}"
        return [header for header, _, _ in opened], [payload.view(codec.dtype) for _, payload, _ in opened]

    def _worker_key(self, rank: int, piece: int) -> int:
        return worker_key(self._key, rank, self._comm.size, piece)

    def _server_key(self, rank: int) -> int:
        return worker_key(self._key, 0, 1, self._comm.size + rank)


def pieces(n: int, size: int, alignment: int) -> list[slice]:
    """Where `size` ranks' pieces of a vector lie, end to end, equal but for the last ones, at multiples of
    `alignment`.
    """
    length = -(-n // (size * alignment)) * alignment
    return [slice(min(rank * length, n), min((rank + 1) * length, n)) for rank in range(size)]


def _length(cut: slice) -> int:
    return cut.stop - cut.start
