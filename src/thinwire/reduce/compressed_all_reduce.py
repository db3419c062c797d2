"""The one file where codecs, topologies and comms meet."""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, State, as_single, decoded, encoded, norm_if_finite, worker_key
from thinwire.codecs.feedback import ErrorFeedback
from thinwire.codecs.header import Header, codec_number, seal, unseal
from thinwire.comm.base import Comm
from thinwire.comm.work import Work
from thinwire.errors import CommError, NonFiniteError
from thinwire.reduce.stages import Errors, LinearMean, TwoStageMean, launched
from thinwire.topology.base import Peers

Notice = Callable[[Tensor, list[Tensor]], None]


def mean_(comm: Comm, x: Tensor, *, count: int | None = None) -> Work[Tensor]:
    """Replace `x` on every rank by its mean over ranks: one all-reduce, 2 (n-1)/n of the vector sent per rank.

    Args:
        comm: the ranks.
        x: a vector; belongs to the wire until the wait.
        count: divide the sum by this instead of by the number of ranks (ranks without a contribution bring zeros).
    """
    divisor = count or comm.size
    work = comm.all_reduce_(x)
    return work if divisor == 1 else work.then(lambda total: total.div_(divisor))


def coded_mean_(
    comm: Comm,
    x: Tensor,
    codec: Codec,
    state: State,
    *,
    key: int = 0,
    count: int | None = None,
    at: int = 0,
    whole: int | None = None,
) -> Work[Tensor]:
    """`mean_` in a codec's payloads: added up by the wire where the codec is linear, else in two stages.

    Args:
        comm: the ranks.
        x: a vector; belongs to the wire until the wait.
        codec: with `ErrorFeedback` around it, what is left unsaid is kept in `state`.
        state: of the codec.
        key: of the random draws, equal on all ranks.
        count: divide the sum by this instead of by the number of ranks.
        at: where `x` begins in the vector that errors are kept for.
        whole: elements of that vector; those of `x` unless given.
    """
    if not codec.linear:
        return two_stage_mean_(comm, x, codec, state, key=key, count=count, at=at, whole=whole)
    if isinstance(codec, ErrorFeedback):
        return launched(comm, LinearMean(comm, x, codec.codec, Errors(state, at, whole), key, count or comm.size))
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
    at: int = 0,
    whole: int | None = None,
) -> Work[Tensor]:
    r"""Replace `x` on every rank by its coded mean: each rank adds up one piece of it, and codes the sum anew.

    With $C$ the codec, $e_i$ and $\bar e$ what workers and servers owe (nothing where the codec needs no feedback),

    $$y_i = C(x_i + e_i), \quad e_i \leftarrow x_i + e_i - y_i; \qquad
      \bar y = C(\tfrac1n \sum_i y_i + \bar e), \quad \bar e \leftarrow \tfrac1n \sum_i y_i + \bar e - \bar y .$$

    Every rank decodes the same bytes. All means that are under way on a comm go into their second stage together,
    when the first of them is waited for. If any rank's vector of any of them is not finite, all ranks get vectors of
    NaN for all of them, and errors stay as they are. Sent per rank: a header of 16 bytes and the codes of a piece to
    each other rank, twice.

    Tang et al., DoubleSqueeze, ICML 2019, arXiv:1905.05957, Algorithm 1.

    Args:
        comm: the ranks.
        x: a vector; belongs to the wire until the wait.
        codec: any whose payloads are bytes.
        state: of the codec: `error`, and `server_error/START-STOP` for this rank's piece.
        key: of the random draws, equal on all ranks.
        count: divide the sum by this instead of by the number of ranks.
        at: where `x` begins in the vector that errors are kept for.
        whole: elements of that vector; those of `x` unless given.

    Raises:
        CommError: on waiting, where a payload is of another codec, step or stage, or damaged, on any rank.
    """
    inner = codec.codec if isinstance(codec, ErrorFeedback) else codec
    remembers = inner is not codec or codec.needs_feedback
    errors = Errors(state, at, whole) if remembers else None
    return launched(comm, TwoStageMean(comm, x, inner, errors, key, count or comm.size))


def mix_(x: Tensor, received: list[Tensor], peers: Peers) -> Tensor:
    """Replace `x` by the weighted sum of itself and what its peers sent."""
    x.mul_(peers.own)
    for weight, y in zip(peers.weights, received, strict=True):
        x.add_(y, alpha=weight)
    return x


def gossip_(comm: Comm, x: Tensor, peers: Peers, notice: Notice | None = None) -> Work[Tensor]:
    """Send `x` to this step's peers and mix in what they send; len(peers.to) vectors sent per rank.

    Args:
        comm: the ranks.
        x: a vector; belongs to the wire until the wait.
        peers: of this step.
        notice: told of `x` and of what came, before they are mixed.
    """

    def mix(received: list[Tensor]) -> Tensor:
        if notice is not None:
            notice(x, received)
        return mix_(x, received, peers)

    return comm.send_recv(x, peers.dst, peers.src).then(mix)


def coded_exchange(comm: Comm, x: Tensor, codec: Codec, peers: Peers, *, key: int) -> Work[tuple[Tensor, list[Tensor]]]:
    """Send the codes of `x` to this step's peers; what they stand for, and what came from each peer, in fp32.

    A header of 16 bytes goes with each.

    Args:
        comm: the ranks.
        x: a vector.
        codec: without a memory of its own.
        peers: of this step.
        key: of the random draws, equal on all ranks.

    Raises:
        NonFiniteError: on waiting, where a peer's vector is not finite, or this one.
        CommError: on waiting, where a payload is of another codec or step, or damaged.
    """
    single, number = as_single(x), codec_number(repr(codec), x.numel())
    finite, square = norm_if_finite(x)
    payload = encoded(codec, single if finite else torch.zeros_like(single), worker_key(key, comm.rank, comm.size))
    header = Header(number, comm.step, spoilt=not finite, square=square)
    message = seal(payload, header)

    def opened(src: int, message: Tensor) -> Tensor:
        theirs, content, problem = unseal(message, header)
        where = f"rank {comm.rank}, step {comm.step}, coded exchange"
        if problem:
            raise CommError(f"{where}: what rank {src} sent {problem}; all ranks must run the same recipe")
        if theirs.spoilt:
            raise NonFiniteError(f"{where}: the parameters of rank {src} are NaN or infinite; lower the learning rate")
        return decoded(codec, content.view(codec.dtype), single, worker_key(key, src, comm.size))

    def open_all(messages: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        mine = opened(comm.rank, message)
        return mine, [opened(src, message) for src, message in zip(peers.src, messages, strict=True)]

    return comm.send_recv(message, peers.dst, peers.src).then(open_all)
