"""Means and exchanges over a comm: plain, compressed by a codec, or weighted by a topology."""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, decode_or_meta, encode_or_meta, norm_if_finite, worker_key
from thinwire.codecs.feedback import ErrorFeedback
from thinwire.codecs.header import Header, codec_number, seal, unseal
from thinwire.comm.base import Comm
from thinwire.comm.work import Work
from thinwire.errors import CommError, NonFiniteError
from thinwire.reduce.stages import LinearMean, Residuals, TwoStageMean, launched
from thinwire.topology.base import Peers

Observer = Callable[[Tensor, list[Tensor]], None]
"""Called with this rank's vector and the received ones."""


def mean_(comm: Comm, x: Tensor, *, count: int | None = None) -> Work[Tensor]:
    """Replace `x` on every rank by its mean over ranks: one all-reduce, 2 (n-1)/n of the vector sent per rank.

    Args:
        comm: the ranks.
        x: a vector; must not be used before the wait.
        count: divide the sum by this instead of the number of ranks, where some ranks contribute zeros.
    """
    divisor = count or comm.size
    work = comm.all_reduce_(x)
    return work if divisor == 1 else work.then(lambda total: total.div_(divisor))


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
) -> Work[Tensor]:
    """`mean_` of compressed vectors: one all-reduce if the codec is linear, else two stages.

    Args:
        comm: the ranks.
        x: a vector; must not be used before the wait.
        codec: compresses the vectors; `ErrorFeedback` keeps its residual in `state`.
        state: of the codec.
        key: of the random draws, equal on all ranks.
        count: divide the sum by this instead of the number of ranks.
        offset: where `x` begins in the vector that residuals are kept for.
        length: elements of that vector; those of `x` unless given.
    """
    if not codec.linear:
        return two_stage_mean_(comm, x, codec, state, key=key, count=count, offset=offset, length=length)
    if isinstance(codec, ErrorFeedback):
        return launched(
            comm, LinearMean(comm, x, codec.codec, Residuals(state, offset, length), key, count or comm.size)
        )
    work = mean_(comm, codec.encode(x, state, key), count=count)
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
) -> Work[Tensor]:
    r"""`mean_` in two compressed stages: each rank (the server of a piece) adds one piece, and encodes the mean again.

    With $C$ the codec, $e_i$ and $\bar e$ the residuals of workers and servers (zero if the codec needs no feedback),

    $$y_i = C(x_i + e_i), \quad e_i \leftarrow x_i + e_i - y_i; \qquad
      \bar y = C(\tfrac1n \sum_i y_i + \bar e), \quad \bar e \leftarrow \tfrac1n \sum_i y_i + \bar e - \bar y .$$

    Every rank decodes the same bytes. All means in flight on a comm are finished together, when the first of them is
    waited for. If any rank's vector of any of them is not finite, all ranks get vectors of NaN for all of them, and
    residuals stay as they are. Sent per rank: a header of 16 bytes and the payload of a piece to each other rank,
    twice.

    Tang et al., DoubleSqueeze, ICML 2019, arXiv:1905.05957, Algorithm 1.

    Args:
        comm: the ranks.
        x: a vector; must not be used before the wait.
        codec: any whose payloads are bytes.
        state: of the codec: `error`, and `server_error/START-STOP` for this rank's piece.
        key: of the random draws, equal on all ranks.
        count: divide the sum by this instead of the number of ranks.
        offset: where `x` begins in the vector that residuals are kept for.
        length: elements of that vector; those of `x` unless given.

    Raises:
        CommError: in `wait`, on all ranks, if any rank received a payload that is damaged or of another codec, step or
            stage.
    """
    inner = codec.codec if isinstance(codec, ErrorFeedback) else codec
    residuals = Residuals(state, offset, length) if inner is not codec or codec.needs_feedback else None
    return launched(comm, TwoStageMean(comm, x, inner, residuals, key, count or comm.size))


def mix_(x: Tensor, received: list[Tensor], peers: Peers) -> Tensor:
    """Replace `x` by the weighted sum of itself and the received vectors, with the topology's weights."""
    # In the order of `peers.src`, so that the sum's bits do not depend on which vector arrived first.
    x.mul_(peers.own)
    for weight, y in zip(peers.weights, received, strict=True):
        x.add_(y, alpha=weight)
    return x


def gossip_(comm: Comm, x: Tensor, peers: Peers, observe: Observer | None = None) -> Work[Tensor]:
    """Exchange `x` with this step's neighbours and replace it by the weighted mean; sends len(peers.dst) vectors.

    Args:
        comm: the ranks.
        x: a vector; must not be used before the wait.
        peers: the neighbours and weights of this step.
        observe: called with `x` and the received vectors, before they are mixed.
    """

    def mix(received: list[Tensor]) -> Tensor:
        if observe is not None:
            observe(x, received)
        return mix_(x, received, peers)

    return comm.send_recv(x, peers.dst, peers.src).then(mix)


def compressed_exchange(
    comm: Comm, x: Tensor, codec: Codec, peers: Peers, *, key: int
) -> Work[tuple[Tensor, list[Tensor]]]:
    """Exchange `x` in compressed form with this step's neighbours, with a header of 16 bytes each.

    Args:
        comm: the ranks.
        x: a vector.
        codec: without error feedback.
        peers: the neighbours of this step.
        key: of the random draws, equal on all ranks.

    Returns:
        Work of this rank's vector as the others decode it, and of the vectors of `peers.src`; all in fp32.

    Raises:
        NonFiniteError: in `wait`, if a neighbour's vector or this rank's is not finite.
        CommError: in `wait`, if a payload is damaged, or of another codec or step.
    """
    # A vector that is not finite is sent as zeros with a flag, so codecs need not handle NaN.
    single, number = as_single(x), codec_number(repr(codec), x.numel())
    finite, square = norm_if_finite(x)
    own_key = worker_key(key, comm.rank, comm.size)
    payload = encode_or_meta(codec, single if finite else torch.zeros_like(single), own_key)
    header = Header(number, comm.step, non_finite=not finite, squared_norm=square)
    own_message = seal(payload, header)

    def decode(src: int, message: Tensor) -> Tensor:
        received, content, problem = unseal(message, header)
        where = f"rank {comm.rank}, step {comm.step}, compressed exchange"
        if problem:
            raise CommError(f"{where}: what rank {src} sent {problem}; all ranks must run the same recipe")
        if received.non_finite:
            raise NonFiniteError(f"{where}: the parameters of rank {src} are NaN or infinite; lower the learning rate")
        return decode_or_meta(codec, content.view(codec.dtype), single, worker_key(key, src, comm.size))

    def decode_all(messages: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        # This rank decodes its own message too, since its neighbours hold the decoded vector and not `x`.
        own = decode(comm.rank, own_message)
        return own, [decode(src, message) for src, message in zip(peers.src, messages, strict=True)]

    return comm.send_recv(own_message, peers.dst, peers.src).then(decode_all)
