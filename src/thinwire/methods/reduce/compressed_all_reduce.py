# SPDX-License-Identifier: Apache-2.0
"""Means and exchanges over a comm: plain, compressed by a codec, or weighted by a topology."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.members import Members
from thinwire.core.comm.pending import PendingMeans, Stages
from thinwire.core.comm.work import Work
from thinwire.core.kernels import Flag, as_fp32, both, is_finite, read_flags
from thinwire.core.kernels.decisions import holds
from thinwire.core.replica.flat import Segment, cut_out
from thinwire.errors import NonFiniteError
from thinwire.methods.codecs.base import (
    Codec,
    Matrix,
    MatrixCodec,
    StageKeys,
    State,
    check_payloads,
    worker_key,
)
from thinwire.methods.codecs.between_nodes import BetweenNodes
from thinwire.methods.codecs.feedback import ErrorFeedback, keep_, residual_dtype, residual_of, server_residual_of
from thinwire.methods.codecs.header import HEADER_BYTES, Header, codec_number, seal, seal_each, unseal, unseal_all
from thinwire.methods.reduce.between_nodes import mean_between_nodes
from thinwire.methods.topology.base import Peers

Observer = Callable[[Tensor, list[Tensor]], None]
"""Called with this rank's vector and the received ones."""
Serve = Callable[[Tensor, slice], Tensor]
"""Called by a server with a part of its mean and the part's position; returns the values to send in its place."""
# Elements that `mean_from_residual` encodes or decodes at a time. On the CPU they stay in the cache; on a GPU each
# kernel should be long.
_PART, _PART_ON_GPU = 1 << 18, 1 << 24


def mean_(comm: Comm, x: Tensor, *, count: int | None = None) -> Work[Tensor]:
    """Replace `x` with its mean over ranks: one all-reduce, 2 (n-1)/n of the vector sent per rank.

    Args:
        comm: the ranks.
        x: a vector; do not use it before the wait.
        count: divide the sum by this instead of the number of ranks, if some ranks contribute zeros.
    """
    divisor = count or _num_contributors(comm, x)
    if x.dtype == torch.float16 and divisor != 1:
        # In fp16 a sum can overflow although the mean is finite.
        return comm.all_reduce_(x.div_(divisor))
    work = comm.all_reduce_(x)
    return work if divisor == 1 else work.then(lambda total: total.div_(divisor))


def _num_contributors(comm: Comm, x: Tensor) -> int:
    """Return the number of ranks that contribute to a mean; zero the vector of a rank that just joined."""
    if comm.rank in comm.silent:
        x.zero_()
    return comm.size - len(comm.silent)


def compressed_mean_(
    comm: Comm,
    x: Tensor,
    codec: Codec,
    state: State,
    *,
    key: int = 0,
    count: int | None = None,
    offset: int = 0,
    length: int | None = None,
    segments: Sequence[Segment] = (),
    pending: PendingMeans | None = None,
    like: Tensor | None = None,
) -> Work[Tensor]:
    """Average compressed vectors: one all-reduce for a linear codec, two for matrices, else two stages.

    Args:
        comm: the ranks.
        x: a vector; do not use it before the wait.
        codec: compresses the vectors; `ErrorFeedback` keeps its residual in `state`.
        state: the state of the codec.
        key: the key of the random draws, equal on all ranks.
        count: divide the sum by this instead of the number of ranks.
        offset: the offset of `x` in the vector of the residuals.
        length: the number of elements of that vector; by default those of `x`.
        segments: the tensors of that vector; without them a matrix codec sends vectors uncompressed.
        pending: the means that finish together with this one; by default none.
        like: a vector in the dtype of the model, for residuals that have it; by default `x`.
    """
    count = count or _num_contributors(comm, x)
    if not codec.traits.keeps_residual and codec.traits.linear:
        return _linear_mean(comm, x, codec, state, key=key, count=count)
    dtype = residual_dtype(codec, x if like is None else like)
    where = ResidualSlice(offset, length if length is not None else x.numel(), segments, dtype)
    mean = _stages(comm, x, codec, state, where, key=key, count=count)
    return (pending or PendingMeans()).launch(mean)


def mean_from_residual(
    comm: Comm,
    x: Tensor,
    codec: Codec,
    state: State,
    *,
    key: int = 0,
    minus: Tensor | None = None,
    into: Tensor | None = None,
    serve: Serve | None = None,
) -> Work[Tensor]:
    """Average like `compressed_mean_` with less memory: only payloads are in flight, and temporaries are short.

    It requires `at_once(codec)`. The residual is updated at the launch, not at the wait. It cannot be restored if
    another rank's vector is not finite, so use this only for means after which such a run ends.

    Args:
        comm: the ranks.
        x: a vector; read at the launch, and not changed.
        codec: with error feedback, in two stages.
        state: the state of the codec, with its residual `error`.
        key: the key of the random draws, equal on all ranks.
        minus: a vector that is subtracted from `x`.
        into: a vector to which the mean is added at the wait, and which is the result; by default a new vector.
        serve: computes from the mean of a part of this rank's piece the values to send to all ranks in its place,
            without a residual; it is called with that mean and the part's position, part by part in order.
    """
    assert isinstance(codec, ErrorFeedback)
    inner, count = codec.codec, comm.size - len(comm.silent)
    cuts, dtype = server_pieces(comm, x, codec), residual_dtype(codec, x)
    residual = residual_of(state, x, dtype=dtype)
    server_residual = None if serve else server_residual_of(state, x, cuts[comm.rank], 0, count, dtype)
    silent = comm.rank in comm.silent

    def source(part: slice) -> Tensor:
        if silent:
            # A rank that just joined contributes nothing: with its residual this is zero.
            return as_fp32(residual[part]).neg()
        found = x[part] if minus is None else x[part].to(minus.dtype) - minus[part].to(x.device)
        return found if found.dtype == torch.float32 else as_fp32(found)

    keys = StageKeys.of(key, comm.rank, comm.size)
    parts = _InParts(inner, source, residual, server_residual, serve, into, cuts, comm.rank, keys, count)
    mean = _two_stage_mean(comm, x, parts, repr(inner))
    return PendingMeans().launch(mean)


def pieces(n: int, size: int, alignment: int) -> list[slice]:
    """Cut a vector of n elements into `size` pieces, end to end at multiples of `alignment`; the last are shorter."""
    length = -(-n // (size * alignment)) * alignment
    return [slice(min(rank * length, n), min((rank + 1) * length, n)) for rank in range(size)]


def pieces_at(edges: Sequence[int], size: int) -> list[slice]:
    """Cut a vector into `size` pieces, end to end and nearly even, at some of the edges; the last of them is its end.

    Example:
        >>> pieces_at([6, 7, 12], size=2), pieces_at([12], size=2)
        ([slice(0, 6, None), slice(6, 12, None)], [slice(0, 0, None), slice(0, 12, None)])
    """
    n = edges[-1]
    cuts = [min([0, *edges], key=lambda edge: abs(edge * size - rank * n)) for rank in range(size + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def server_pieces(comm: Comm, x: Tensor, codec: Codec) -> list[slice]:
    """Return the piece of which each rank is the server, in `mean_from_residual`."""
    return pieces(x.numel(), comm.size, codec.traits.alignment)


def at_once(codec: Codec) -> bool:
    """Return True if a message's error is known at its launch: with error feedback in two stages."""
    traits = codec.traits
    return isinstance(codec, ErrorFeedback) and not (traits.linear or traits.own_mean or traits.forgets)


def _known_for(codec: Codec, finite: Flag) -> Flag:
    """Return the flag, read on the host unless the codec takes all that is not finite or valid."""
    return finite if codec.traits.takes_nan else holds(finite)


def _nan_unless_(payload: Tensor, finite: Flag) -> Tensor:
    """Fill a payload with NaN if a vector is not finite: this makes its sum NaN on all ranks, so no flag is needed."""
    if isinstance(finite, Tensor):
        return payload.masked_fill_(finite.logical_not(), torch.nan)
    return payload if finite else payload.fill_(torch.nan)


class ResidualSlice(NamedTuple):
    """The position of a vector in the vector of the residuals.

    Attributes:
        offset: the index of its first element.
        length: the number of elements of the vector of the residuals.
        segments: the tensors of the vector of the residuals.
        dtype: the dtype of new residuals.
    """

    offset: int
    length: int
    segments: Sequence[Segment] = ()
    dtype: torch.dtype = torch.float32


def _stages(comm: Comm, x: Tensor, codec: Codec, state: State, where: ResidualSlice, *, key: int, count: int) -> Stages:
    """Average with a codec, in stages."""
    if isinstance(codec, BetweenNodes) and comm.size == 1:
        codec = codec.codec
    if isinstance(codec, BetweenNodes):
        inner = codec.codec

        def part_mean(peers: Comm, part: Tensor, own: slice) -> Stages:
            place = where._replace(offset=where.offset + own.start)
            return _stages(peers, part, inner, state, place, key=key, count=peers.size)

        if isinstance(inner, MatrixCodec):
            edges = [each.stop for each in matrices_of(where.segments, x, where.offset)]
            cuts = pieces_at(edges, codec.node_size)
        else:
            cuts = pieces(x.numel(), codec.node_size, codec.traits.alignment)
        return mean_between_nodes(comm, x, codec.node_size, cuts, part_mean, count=count)
    linear, keeps_residual = codec.traits.linear, codec.traits.keeps_residual
    if linear and not keeps_residual:
        return _linear_stages(comm, x, codec, state, key=key, count=count)
    residual = residual_of(state, x, where.offset, where.length, where.dtype) if keeps_residual else None
    if isinstance(codec, MatrixCodec) and residual is not None:
        matrices = matrices_of(where.segments, x, where.offset)
        return _matrix_mean(comm, x, codec, residual, matrices, state, key=key, count=count)
    if codec.traits.one_round:
        return _gathered_mean(comm, x, codec, residual, key=key, count=count)
    if isinstance(codec, ErrorFeedback) and linear and residual is not None:
        return _residual_mean(comm, x, codec, residual, key=key, count=count)
    return _two_stages_of(comm, x, codec, state, where, codec, key=key, count=count)


def _linear_mean(comm: Comm, x: Tensor, codec: Codec, state: State, *, key: int, count: int) -> Work[Tensor]:
    """Average payloads that an all-reduce can add, without residuals."""
    payload = codec.encode(x, state, key)
    # A codec that drops elements could drop a non-finite one too.
    if not codec.traits.elementwise:
        _nan_unless_(payload, is_finite(x))
    work = mean_(comm, payload, count=count)
    return work.then(lambda payload: x.copy_(codec.decode(payload, x, key)))


def two_stage_mean_(
    comm: Comm,
    x: Tensor,
    codec: Codec,
    state: State,
    *,
    key: int = 0,
    count: int | None = None,
    offset: int = 0,
    length: int | None = None,
    pending: PendingMeans | None = None,
    server: Codec | None = None,
) -> Work[Tensor]:
    r"""Average in two compressed stages: each rank is the server of a piece, adds it and encodes its mean.

    With $C$ the codec, $e_i$ and $\bar e$ the residuals of workers and servers (zero if the codec needs no feedback),

    $$y_i = C(x_i + e_i), \quad e_i \leftarrow x_i + e_i - y_i; \qquad
      \bar y = C(\tfrac1n \sum_i y_i + \bar e), \quad \bar e \leftarrow \tfrac1n \sum_i y_i + \bar e - \bar y .$$

    Every rank decodes the same bytes. If any rank's vector is not finite, here or in a mean that finishes together with
    this one, all ranks get vectors of NaN for all of them, and residuals are unchanged. Each rank sends a header of 16
    bytes and the payload of a piece to each other rank, twice.

    Tang et al., DoubleSqueeze, ICML 2019, arXiv:1905.05957, Algorithm 1.

    Args:
        comm: the ranks.
        x: a vector; do not use it before the wait.
        codec: any codec; if it needs error feedback, it gets it even without `ErrorFeedback`.
        state: the state of the codec: `error`, and `server_error/START-STOP` for this rank's piece.
        key: the key of the random draws, equal on all ranks.
        count: divide the sum by this instead of the number of ranks.
        offset: the offset of `x` in the vector of the residuals.
        length: the number of elements of that vector; by default those of `x`.
        pending: the means that finish together with this one; by default none.
        server: the codec of the second stage; by default that of the first.

    Raises:
        CommError: in `wait`, on all ranks, if any rank received a payload that is damaged or belongs to another codec,
            step or stage.
    """
    check_payloads(codec)
    where = ResidualSlice(offset, length if length is not None else x.numel(), dtype=residual_dtype(codec, x))
    mean = _two_stages_of(comm, x, codec, state, where, server, key=key, count=count or comm.size)
    return (pending or PendingMeans()).launch(mean)


def _two_stages_of(
    comm: Comm,
    x: Tensor,
    codec: Codec,
    state: State,
    where: ResidualSlice,
    server: Codec | None,
    *,
    key: int,
    count: int,
) -> Stages:
    """Run `two_stage_mean_` in stages."""
    inner, decay = (codec.codec, codec.decay) if isinstance(codec, ErrorFeedback) else (codec, 1.0)
    answer = inner if server is None or server is codec else server
    # Cut at block boundaries of both codecs, so that no block is split between servers.
    cuts = pieces(x.numel(), comm.size, lcm(inner.traits.alignment, answer.traits.alignment))
    residuals = None
    if inner is not codec or codec.traits.needs_feedback:
        residual = residual_of(state, x, where.offset, where.length, where.dtype)
        residuals = residual, server_residual_of(state, x, cuts[comm.rank], where.offset, count, where.dtype)
    keys = StageKeys.of(key, comm.rank, comm.size)
    whole = _Whole(x, as_fp32(x), inner, answer, residuals, decay, cuts, comm.rank, keys, count)
    return _two_stage_mean(comm, x, whole, repr(inner) if answer is inner else f"{inner!r} and {answer!r}")


@dataclass
class _Whole:
    """A mean that replaces its vector, and leaves it and the residuals unchanged until all ranks have succeeded.

    Its methods are the computations of `_two_stage_mean` between its messages, as are those of `_InParts`.
    """

    x: Tensor
    updated: Tensor  # becomes the new residual; shares memory with `x` if that is in fp32
    codec: Codec
    server: Codec
    residuals: tuple[Tensor, Tensor] | None
    decay: float
    cuts: Sequence[slice]
    rank: int
    keys: StageKeys
    count: int
    error: Tensor = field(init=False)  # of this server's answer

    def finite(self) -> Flag:
        """Return whether this rank's vector is finite."""
        return _known_for(self.codec, is_finite(self.x))

    def encode(self) -> list[Tensor]:
        """Return the payload of each piece."""
        if self.residuals is None:
            pieces = zip(self.cuts, self.keys.own, strict=True)
            return [self.codec.encode(self.updated[cut], {}, key) for cut, key in pieces]
        return self.codec.encode_pieces_with_residual_(
            self.updated, as_fp32(self.residuals[0]), self.cuts, self.keys.own
        )

    def answer(self, payloads: Sequence[Tensor], finite: Flag) -> tuple[Tensor | None, Flag]:
        """Return the payload of the mean of this rank's piece, and whether it and `finite` are; else None."""
        mean = self.codec.decode_sum(payloads, self.updated[self.cuts[self.rank]], self.keys.received).div_(self.count)
        # The sum of finite decoded vectors may overflow; then the step is skipped, and residuals stay finite.
        # Some codes cannot encode it, and must not raise on this rank alone.
        key, finite = self.keys.means[self.rank], _known_for(self.server, both(finite, is_finite(mean)))
        if finite is False:
            return None, False
        if self.residuals is None:
            return self.server.encode(mean, {}, key), finite
        cuts = [slice(0, mean.numel())]
        (code,) = self.server.encode_pieces_with_residual_(mean, as_fp32(self.residuals[1]), cuts, [key])
        self.error = mean
        return code, both(finite, is_finite(mean))

    def keep(self) -> None:
        """Update the residuals after all ranks have succeeded."""
        if self.residuals is not None:
            keep_(self.residuals[0], self.updated, self.decay)
            self.residuals[1].copy_(self.error)
            del self.error

    def decode(self, payloads: Sequence[Tensor] | None) -> Tensor:
        """Return the mean from the payloads of all pieces; without payloads, NaN."""
        if payloads is None:
            return self.x.fill_(torch.nan)
        self.server.decode_pieces_(payloads, self.updated, self.cuts, self.keys.means)
        return self.x if self.updated.data_ptr() == self.x.data_ptr() else self.x.copy_(self.updated)


@dataclass
class _InParts:
    """A mean of `mean_from_residual`: encoded, added and decoded part by part, so that temporaries are short."""

    codec: Codec
    source: Callable[[slice], Tensor]
    residual: Tensor
    server_residual: Tensor | None
    serve: Serve | None
    into: Tensor | None
    cuts: Sequence[slice]
    rank: int
    keys: StageKeys
    count: int

    @property
    def server(self) -> Codec:
        return self.codec

    @property
    def limit(self) -> int:
        """The elements of a part, at most."""
        if self.residual.is_meta:
            return max(_PART, self.residual.numel() // 64)  # a dry run of a large model has fewer parts
        return _PART_ON_GPU if self.residual.is_cuda else _PART

    def _parts(self, cut: slice) -> list[slice]:
        """Cut a piece into parts that the codec can encode one at a time."""
        traits = self.codec.traits
        if cut.stop - cut.start <= self.limit or not traits.separable:
            return [cut]
        size = traits.alignment * max(1, self.limit // traits.alignment)
        return [slice(start, min(start + size, cut.stop)) for start in range(cut.start, cut.stop, size)]

    def _parts_of(self, payload: Tensor, cut: slice) -> Iterable[tuple[Tensor, slice]]:
        """Return the payload of each part of a piece, one after the other."""
        parts, n = self._parts(cut), cut.stop - cut.start
        if len(parts) == 1:
            return [(payload, cut)]
        own = (slice(part.start - cut.start, part.stop - cut.start) for part in parts)
        return ((self.codec.part_of(payload, n, each), part) for each, part in zip(own, parts, strict=True))

    def finite(self) -> Flag:
        if self.residual.is_meta:
            return True
        starts = range(0, self.residual.numel(), self.limit)
        flags = (is_finite(self.source(slice(start, start + self.limit))) for start in starts)
        return _known_for(self.codec, reduce(both, flags, True))

    def encode(self) -> list[Tensor]:
        payloads = list[Tensor]()
        for cut, key in zip(self.cuts, self.keys.own, strict=True):
            parts, codes = self._parts(cut), list[Tensor]()
            for part in parts:
                codes.append(self._encode(self.residual[part], self.source(part), key)[0])
            payloads.append(codes[0] if len(codes) == 1 else self.codec.join_parts(codes, parts))
        del self.source  # it refers to the vector, of which nothing is needed any more
        return payloads

    def answer(self, payloads: Sequence[Tensor], finite: Flag) -> tuple[Tensor | None, Flag]:
        cut, key = self.cuts[self.rank], self.keys.means[self.rank]
        parts, codes = self._parts(cut), list[Tensor]()
        for row in zip(*(self._parts_of(payload, cut) for payload in payloads), strict=True):
            part = row[0][1]
            like = torch.empty(part.stop - part.start, dtype=torch.float32, device=self.residual.device)
            mean = self.codec.decode_sum([code for code, _ in row], like, self.keys.received).div_(self.count)
            del like
            # The sum of finite decoded vectors may overflow, and a sparse code would leave no trace of it here.
            finite = _known_for(self.codec, both(finite, is_finite(mean)))
            if finite is False:
                return None, False
            if self.serve is not None:
                mean = self.serve(mean, part)
                codes.append(self.codec.encode(mean, {}, key))
            elif self.server_residual is not None:
                residual = self.server_residual[part.start - cut.start : part.stop - cut.start]
                code, mean = self._encode(residual, mean, key)
                codes.append(code)
            finite = both(finite, is_finite(mean))
        return codes[0] if len(codes) == 1 else self.codec.join_parts(codes, parts), finite

    def _encode(self, residual: Tensor, x: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Encode a part, and overwrite its residual with the error, which is also returned in fp32."""
        # Only the sum is used; the first of the two, the residual, becomes the error.
        error = residual if residual.dtype == torch.float32 else residual.to(torch.float32)
        code = self.codec.encode_with_residual_(error, x, key)
        if error.dtype != residual.dtype:
            residual.copy_(error)
        return code, error

    def keep(self) -> None:
        pass

    def decode(self, payloads: Sequence[Tensor] | None) -> Tensor:
        n, device = self.residual.numel(), self.residual.device
        if payloads is None:
            into = self.into if self.into is not None else torch.empty(n, dtype=torch.float32, device=device)
            return into.fill_(torch.nan)
        if self.into is None or n <= self.limit:
            found = torch.empty(n, dtype=torch.float32, device=device)
            self.codec.decode_pieces_(payloads, found, self.cuts, self.keys.means)
            return found if self.into is None else self.into.add_(found.to(self.into.device))
        for payload, cut, key in zip(payloads, self.cuts, self.keys.means, strict=True):
            for code, part in self._parts_of(payload, cut):
                like = as_fp32(self.residual[part])
                self.into[part].add_(self.codec.decode(code, like, key).to(self.into.device))
        return self.into


def _two_stage_mean(comm: Comm, x: Tensor, ends: _Whole | _InParts, recipe: str) -> Stages:
    """Run all of `two_stage_mean_`; `PendingMeans` resumes it after each `yield`."""
    codec, server, n, device = ends.codec, ends.server, x.numel(), x.device
    del x
    lengths = [cut.stop - cut.start for cut in ends.cuts]
    sizes = [codec.nbytes(length) for length in lengths]
    mean_sizes = sizes if server is codec else [server.nbytes(length) for length in lengths]

    # Encode each piece, unless it is known that it is not finite. On a GPU this is not known here; then the payload is
    # encoded all the same, and its header says that it is meaningless.
    finite = ends.finite()
    if finite is False:
        payloads = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
    else:
        payloads = ends.encode()
    # The step of the launch, since the waits may belong to a later step.
    header = Header(codec_number(recipe, n), comm.step)
    messages = seal_each(payloads, header._replace(finite=finite))

    # All-to-all: each piece to the rank that is its server.
    scattered = comm.all_to_all(messages, [HEADER_BYTES + sizes[comm.rank]] * comm.size)
    del messages
    yield

    # Decode all ranks' payloads of this rank's piece, and encode their mean.
    received = unseal_all(scattered.wait(), header, codec.traits.dtype, comm.name)
    del scattered
    finite, code = _known_for(codec, received.usable), None
    if finite is not False:
        code, finite = ends.answer(received.payloads, finite)
    # An all-gather needs payloads of one size: that of the first piece, the longest one.
    payload = torch.zeros(mean_sizes[0], dtype=torch.uint8, device=device)
    if code is not None:
        payload[: code.nbytes].copy_(code.view(torch.uint8))
    del code
    received.payloads.clear()

    # All-gather the mean of this rank's piece, or a flag for an invalid payload, so that all ranks raise.
    header = header._replace(second_stage=True)
    message = seal(payload, header._replace(finite=finite, accepted=received.valid))
    del payload
    gathered = comm.all_gather(message)
    del message
    yield

    # All ranks check the same flags of all servers before any of them changes its residuals or its vector.
    means = unseal_all(gathered.wait(), header, server.traits.dtype, comm.name)
    del gathered

    def refuse() -> None:
        for opened in (received, means):
            opened.refuse(f"{comm.name(comm.rank)}, step {header.step}, compressed mean")

    if means.valid is False:
        refuse()
    all_finite = yield means.usable
    if all_finite:
        ends.keep()
    elif means.valid is not True:
        refuse()
    yield

    # Decode the means of all pieces.
    if not all_finite:
        return ends.decode(None)
    sized = zip(means.payloads, mean_sizes, strict=True)
    return ends.decode([payload[: nbytes // payload.element_size()] for payload, nbytes in sized])


def _residual_mean(comm: Comm, x: Tensor, feedback: ErrorFeedback, residual: Tensor, *, key: int, count: int) -> Stages:
    """Average payloads that an all-reduce can add, with residuals; `yield` as in `_two_stage_mean`."""
    updated, codec = as_fp32(x), feedback.codec  # the vector becomes the new residual

    # Encode.
    own = _known_for(codec, is_finite(x))
    if own is False:
        payload = codec.encode(torch.zeros_like(updated), {}, key)
    elif codec.traits.residual_after_sum:
        payload = codec.encode(updated.add_(residual), {}, key)
    else:
        payload = codec.encode_with_residual_(updated, as_fp32(residual), key)
    _nan_unless_(payload, own)

    # All-reduce. It has no second stage, so it is awaited as late as possible.
    reduced = mean_(comm, payload, count=count)
    yield
    yield
    payload = reduced.wait()
    finite = yield is_finite(payload)

    # Decode.
    if not finite:
        x.fill_(torch.nan)
    else:
        mean = codec.decode(payload, updated, key)
        if codec.traits.residual_after_sum:
            # Each of `size` workers subtracts this part of the mean; together they subtract `count` means: the sum.
            updated.sub_(mean, alpha=count / comm.size)
        # The residual first: `updated` shares memory with `x` if `x` is in fp32.
        keep_(residual, updated, feedback.decay)
        x.copy_(mean)
    yield
    return x


def _linear_stages(comm: Comm, x: Tensor, codec: Codec, state: State, *, key: int, count: int) -> Stages:
    """Run `_linear_mean` as a mean in stages."""
    work = _linear_mean(comm, x, codec, state, key=key, count=count)
    yield
    yield
    found = work.wait()
    finite = yield is_finite(found)
    yield
    return found if finite else found.fill_(torch.nan)


def _gathered_mean(comm: Comm, x: Tensor, codec: Codec, residual: Tensor | None, *, key: int, count: int) -> Stages:
    """Average all workers' payloads after an all-gather; `yield` as in `_two_stage_mean`."""
    inner, decay = (codec.codec, codec.decay) if isinstance(codec, ErrorFeedback) else (codec, 1.0)
    header = Header(codec_number(repr(inner), x.numel()), comm.step)
    keys = [worker_key(key, rank, comm.size) for rank in range(comm.size)]
    updated, own = as_fp32(x), _known_for(inner, is_finite(x))
    if own is False:
        payload = x.new_zeros(inner.nbytes(x.numel()), dtype=torch.uint8)
    elif residual is None:
        payload = inner.encode(updated, {}, keys[comm.rank])
    else:
        payload = inner.encode_with_residual_(updated, as_fp32(residual), keys[comm.rank])
    gathered = comm.all_gather(seal(payload, header._replace(finite=own)))
    yield
    yield

    # All ranks read the same flags and decode the same bytes, in the same order.
    received = unseal_all(gathered.wait(), header, inner.traits.dtype, comm.name)
    del gathered

    where = f"{comm.name(comm.rank)}, step {header.step}, gathered mean"
    if received.valid is False:
        received.refuse(where)
    mean, usable = None, _known_for(inner, received.usable)
    if usable is not False:
        mean = inner.decode_sum(received.payloads, updated, keys).div_(count)
        usable = both(usable, is_finite(mean))
    finite = yield usable

    if not finite or mean is None:
        received.refuse(where)
        x.fill_(torch.nan)
    else:
        if residual is not None:
            keep_(residual, updated, decay)
        x.copy_(mean)
    yield
    return x


def _matrix_mean(
    comm: Comm,
    x: Tensor,
    codec: MatrixCodec,
    residual: Tensor,
    matrices: Sequence[Matrix],
    state: State,
    *,
    key: int,
    count: int,
) -> Stages:
    """Average with a matrix codec, by two all-reduces; `yield` as in `_two_stage_mean`."""
    updated, own = as_fp32(x), is_finite(x)
    if own is False:
        updated.zero_()
    else:
        updated.add_(residual)
    rounds = codec.mean(updated, residual, matrices, state, key=key, share=count / comm.size)

    # The first all-reduce. NaN makes the sum NaN on all ranks, so no flag is needed.
    reduced = mean_(comm, _nan_unless_(next(rounds), own), count=count)
    yield

    # The second all-reduce continues from the sum of the first, which is the same on all ranks, like its result.
    summed = reduced.wait()
    usable = is_finite(summed)
    summed = rounds.send(summed if usable is not False else summed.zero_())
    # On a subset of the ranks this is a call of all ranks, whose own parts may be longer, and finite.
    called = isinstance(comm, Members) or (summed.numel() and usable is not False)
    reduced = mean_(comm, summed, count=count) if called else None
    yield
    if reduced is not None:
        summed = reduced.wait()
        usable = both(usable, is_finite(summed))
    finite = yield usable

    # Decode, and keep the error of the mean as the residual.
    if not finite:
        x.fill_(torch.nan)
        rounds.close()
    else:
        with suppress(StopIteration):
            rounds.send(summed)
        if updated.data_ptr() != x.data_ptr():
            x.copy_(updated)
    yield
    return x


def matrices_of(segments: Sequence[Segment], x: Tensor, offset: int) -> list[Matrix]:
    """Return the tensors in `x`, the part of a vector from `offset` on; without segments, `x` as one row.

    A partly covered tensor, or one with gaps in memory, has one row.
    """
    found: list[Matrix] = []
    for each in cut_out(segments, slice(offset, offset + x.numel())):
        # The outermost dimension in memory, also for channels-last or transposed tensors.
        outer = max(range(len(each.shape)), key=each.stride.__getitem__, default=0)
        rows = each.shape[outer] if len(each.shape) > 1 else 1
        if each.size:
            found.append(Matrix(each.start, rows, each.size // rows, offset + each.start))
    return found or [Matrix(0, 1, x.numel(), offset)]


def mix_(x: Tensor, received: list[Tensor], peers: Peers) -> Tensor:
    """Replace `x` with the weighted sum of itself and the received vectors, with the topology's weights."""
    # In the order of `peers.src`, so that the sum's bits do not depend on the order of arrival.
    x.mul_(peers.own)
    for weight, y in zip(peers.weights, received, strict=True):
        x.add_(y, alpha=weight)
    return x


def gossip_(comm: Comm, x: Tensor, peers: Peers, observe: Observer | None = None) -> Work[Tensor]:
    """Exchange `x` with this step's neighbors and replace it with the weighted mean.

    Args:
        comm: the ranks.
        x: a vector; do not use it before the wait.
        peers: the neighbors and weights of this step; len(peers.dst) vectors are sent.
        observe: called with `x` and the received vectors, before the mixing.
    """

    def mix(received: list[Tensor]) -> Tensor:
        if observe is not None:
            observe(x, received)
        return mix_(x, received, peers)

    return comm.send_recv(x, peers.dst, peers.src).then(mix)


def compressed_exchange(
    comm: Comm, x: Tensor, codec: Codec, peers: Peers, *, key: int
) -> Work[tuple[Tensor, list[Tensor]]]:
    """Exchange `x` in compressed form with this step's neighbors, with a header of 16 bytes each.

    Args:
        comm: the ranks.
        x: a vector.
        codec: a codec without error feedback.
        peers: the neighbors of this step.
        key: the key of the random draws, equal on all ranks.

    Returns:
        The work. Its result is this rank's vector as decoded by others, and the vectors of `peers.src`, in fp32.

    Raises:
        NonFiniteError: in `wait`, if a neighbor's vector or this rank's is not finite.
        CommError: in `wait`, if a payload is damaged, or belongs to another codec or step.
    """
    # A non-finite vector is sent as zeros with a flag, so codecs need not handle NaN.
    single, number = as_fp32(x), codec_number(repr(codec), x.numel())
    finite = _known_for(codec, is_finite(x))
    own_key = worker_key(key, comm.rank, comm.size)
    payload = codec.encode(torch.zeros_like(single) if finite is False else single, {}, own_key)
    header = Header(number, comm.step, finite=finite)
    own_message = seal(payload, header)

    # This rank decodes its own message too, since its neighbors hold the decoded vector and not `x`.
    sources = [comm.rank, *peers.src]

    def decode_all(messages: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        messages = [own_message, *messages]
        opened = unseal_all(messages, header, codec.traits.dtype, lambda place: comm.name(sources[place]))
        usable, valid = read_flags([opened.usable, opened.valid])
        where = f"{comm.name(comm.rank)}, step {comm.step}, compressed exchange"
        if not valid:
            opened.refuse(where)
        if not usable:
            src = next(src for src, each in zip(sources, messages, strict=True) if not unseal(each, header)[0].finite)
            raise NonFiniteError(
                f"{where}: the parameters of {comm.name(src)} are NaN or infinite. Lower the learning rate"
            )
        own, *others = (
            codec.decode(payload, single, worker_key(key, src, comm.size))
            for src, payload in zip(sources, opened.payloads, strict=True)
        )
        return own, others

    return comm.send_recv(own_message, peers.dst, peers.src).then(decode_all)
