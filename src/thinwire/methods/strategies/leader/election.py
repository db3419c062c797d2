# SPDX-License-Identifier: Apache-2.0
"""Leader election: every worker has a score, and the worker with the least finite score leads.

An election is an all-reduce of a 64-bit key per worker: the score, as bits in the order of scores, above the rank. The
least key names the best worker, and the lowest rank among equals. Scores that are NaN or infinite are ordered after all
others, and workers without a score after these.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.kernels.decisions import decide
from thinwire.core.replica.replica import Replica, as_number
from thinwire.errors import ConfigError
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import At, Strategy

_LOW_BITS = 0x7FFFFFFF
_NOT_FINITE = 0x7F800000  # the bits of infinity: above those of every finite score
_NO_SCORE = 0x7FFFFFFF
_RANKS = 0xFFFFFFFF
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES, _CHUNKS = 1 << 15, 1 << 20, 16


class ScoreFunction:
    """A score that the caller computes; less is better.

    A forward pass over the same few examples on all ranks compares parameters, without the noise of batches.

    Args:
        compute: returns the score of a replica, as a tensor on the device of the parameters or as a float.
        name: its name in recipes, equal on all ranks. A recipe with a score function cannot be parsed.

    Example:
        >>> import torch, thinwire
        >>> smallest = ScoreFunction(lambda r: r.x.sum(), name="smallest")
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, 3.0 - comm.rank)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ...     strategy = thinwire.LeaderSGD(period=1, pull=1.0, metric=smallest)
        ...     worker = thinwire.attach(model, optimizer, strategy, comm=comm, init="own")
        ...     model(torch.ones(1)).sum().backward()
        ...     optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(3, train)  # rank 2 starts with the smallest weight, 1, and leads
        [1.0, 1.0, 1.0]
    """

    def __init__(self, compute: Callable[[Replica], Tensor | float], name: str = "probe") -> None:
        self._compute = compute
        self._name = name

    def __repr__(self) -> str:
        return f"ScoreFunction({self._name!r})"

    def __call__(self, r: Replica) -> Tensor:
        """Compute this worker's score.

        Raises:
            ConfigError: it is not one number, or it is on another device than the parameters.
        """
        value = self._compute(r)
        if isinstance(value, Tensor) and value.device != r.x.device:
            raise ConfigError(f"{self}: returned a tensor on {value.device}. Compute it on {r.x.device}")
        return as_number(value, r.x, repr(self))


ScoreSource = Literal["window", "ema"] | ScoreFunction


# -- elections ---------------------------------------------------------------------------------------------------------


def encode_key(r: Replica, score: Tensor | None) -> Tensor:
    """Return this worker's score and rank as one number: int64, [1]."""
    if score is None:
        return torch.full((1,), (_NO_SCORE << 32) | r.comm.rank, dtype=torch.int64, device=r.x.device)
    score = score.reshape(1).float() + 0.0  # minus zero becomes zero
    # The bits of non-negative floats have the order of the floats; those of negative floats the reverse order.
    bits = score.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ _LOW_BITS, bits)
    return (torch.where(torch.isfinite(score), ordered, _NOT_FINITE) << 32) | r.comm.rank


def elect(r: Replica, score: Tensor | None) -> int | None:
    """Return the rank with the least score, by an all-reduce of 8 bytes; None if no score is finite.

    Raises:
        ConfigError: no worker has recorded a loss; on all ranks.
    """
    return best_rank([key_of(r, r.comm.all_reduce_(encode_key(r, score), op="min").wait())])


def key_of(r: Replica, key: Tensor, members: Sequence[int] | None = None) -> int:
    """Return a key as a number; for a meta tensor, that of this rank, or of the next rank among the members.

    The leader sends its parameters along a chain, which ends at the rank before it; that rank sends nothing.
    """
    ranks = range(r.comm.size) if members is None else members
    after = ranks[(ranks.index(r.comm.rank) + 1) % len(ranks)]
    return decide(key, lambda: int(key), most=r.comm.rank, least=after)


def best_rank(keys: Sequence[int]) -> int | None:
    """Return the rank with the least key; None if no score is finite.

    Raises:
        ConfigError: none of these workers has recorded a loss.
    """
    least = min(keys)
    if least >> 32 == _NO_SCORE:
        raise ConfigError(
            "no worker has recorded a loss, which elections compare. Call worker.record_batch(loss=loss) before "
            "optimizer.step(), or pass metric=ScoreFunction(...)"
        )
    return None if least >> 32 == _NOT_FINITE else least & _RANKS


def gather_keys(r: Replica, score: Tensor | None, members: Sequence[int]) -> Mapping[int, Tensor]:
    """Exchange 8-byte keys with some ranks; return the keys by rank, including this rank's."""
    own = encode_key(r, score)
    others = [rank for rank in members if rank != r.comm.rank]
    received = r.comm.send_recv(own, others, others).wait()
    keys = dict(zip(others, received, strict=True)) | {r.comm.rank: own}
    return {rank: keys[rank] for rank in members}


def warn_without_leader(r: Replica) -> None:
    """Count a round without a leader, and warn of the first."""
    if r.state["rounds_without_leader"] == 0:
        warnings.warn(
            f"{r.comm.name(r.comm.rank)}, step {r.step}: no worker's loss is finite, so no leader is elected. Lower "
            "the learning rate",
            stacklevel=3,
        )
    r.state["rounds_without_leader"] += 1


# -- the leader's parameters -------------------------------------------------------------------------------------------


def chain_from(source: int, members: Sequence[int]) -> list[int]:
    """Return ranks in the order in which they forward a vector, starting with `source`."""
    place = members.index(source)
    return [*members[place:], *members[:place]]


def chain_broadcast_(comm: Comm, x: Tensor, chain: Sequence[int]) -> Tensor:
    """Broadcast `x` from the first rank of a chain along it, in pieces; no rank sends a piece twice.

    Args:
        comm: the comm of all ranks; those outside the chain do not call this.
        x: a vector.
        chain: the ranks in order, including this one.
    """
    place = chain.index(comm.rank)
    # Each rank forwards a piece while it receives the next one.
    nbytes = min(_MAX_CHUNK_BYTES, max(_MIN_CHUNK_BYTES, x.numel() * x.element_size() // _CHUNKS))
    pieces = x.split(max(1, nbytes // x.element_size()))
    receiving = [comm.send_recv(piece, [], [chain[place - 1]]) for piece in pieces] if place else []
    sending = [comm.send_recv(piece, [chain[1]], []) for piece in pieces] if not place and len(chain) > 1 else []
    for piece, work in zip(pieces, receiving, strict=False):
        piece.copy_(work.wait()[0])
        if place < len(chain) - 1:
            sending.append(comm.send_recv(piece, [chain[place + 1]], []))
    for work in sending:
        work.wait()
    return x


def two_level_broadcast_(comm: Comm, x: Tensor, source: int, node_size: int) -> Tensor:
    """Broadcast `x` from `source` to all ranks, so that each other node of consecutive ranks receives it once."""
    place, first = source % node_size, comm.rank - comm.rank % node_size
    column = list(range(place, comm.size, node_size))
    if comm.rank in column:
        chain_broadcast_(comm, x, chain_from(source, column))
    return chain_broadcast_(comm, x, chain_from(first + place, range(first, first + node_size)))


class LeaderStrategy(Strategy):
    """A strategy that pulls workers to the best of them.

    Attributes:
        period: the losses of the window, or over which the moving average decays.
        pull: the part of the way to the leader.
        metric: "window" scores the mean of the last losses, "ema" their exponential moving average.
        result: the parameters to evaluate and save.
    """

    period: int = 1
    pull: float
    metric: ScoreSource = "window"
    result: Literal["leader", "mean"] = "leader"

    paper = "Teng et al., Leader Stochastic Gradient Descent, NeurIPS 2019, arXiv:1905.10395"

    def start(self, r: Replica) -> None:
        """Allocate the losses; call a score function once to check it."""
        if isinstance(self.metric, ScoreFunction):
            self.metric(r)
        else:
            r.state["losses"] = r.x.new_zeros(self.period if self.metric == "window" else 1, dtype=torch.float32)
            r.state["num_losses"] = torch.zeros((), dtype=torch.int64, device="cpu")
        r.state["rounds_without_leader"] = torch.zeros((), dtype=torch.int64, device="cpu")

    @abstractmethod
    def after_step(self, r: Replica) -> None:
        """Record the loss, and follow the leader if it is time for an election."""

    def record_loss(self, r: Replica) -> None:
        """Record this step's loss from `worker.record_batch`, if any, without waiting for the device."""
        if r.loss is None or isinstance(self.metric, ScoreFunction):
            return
        losses, count = r.state["losses"], r.state["num_losses"]
        if self.metric == "window":
            losses[int(count) % len(losses)] = r.loss
        else:
            # Restarts after a non-finite loss: the mean would otherwise stay NaN.
            restart = (count == 0).to(losses.device) | ~torch.isfinite(losses)
            losses.copy_(torch.where(restart, r.loss, losses.lerp(r.loss.expand(1), 1 / self.period)))
        count += 1

    def score(self, r: Replica) -> Tensor | None:
        """Return this worker's score; None if it has recorded no loss."""
        if isinstance(self.metric, ScoreFunction):
            return self.metric(r)
        # The zeros in the rest of the window would improve the score.
        losses = r.state["losses"][: int(r.state["num_losses"])]
        return losses.mean() if len(losses) else None

    def elect(self, r: Replica) -> int | None:
        """Elect the leader and record it in the metrics; warn once per run and return None if no score is finite."""
        leader = elect(r, self.score(r))
        if leader is None:
            warn_without_leader(r)
        else:
            r.metrics["leader"] = float(leader)
        return leader

    def follow_(self, r: Replica) -> None:
        """Elect the leader, and move a part of the way to it."""
        leader = self.elect(r)
        if leader is None or not self.pull:
            return
        x = r.x if r.comm.rank == leader else torch.empty_like(r.x)
        z = r.comm.broadcast_(x, leader).wait()
        if r.comm.rank != leader:
            r.x.lerp_(z, self.pull)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the best worker's parameters, equal on all ranks, or the mean of all if `result` is "mean".

        An outer step starts from the mean. With a `ScoreFunction`, which scores the workers of this run, another number
        of workers also continues from the mean; and all do if no score is finite.
        """
        of_this_run = at != "now" and isinstance(self.metric, ScoreFunction)
        if self.result == "mean" or r.comm.size == 1 or at == "outer" or of_this_run:
            return super().average(r, at)
        least = key_of(r, r.comm.all_reduce_(encode_key(r, self.score(r)), op="min").wait())
        if least >> 32 >= _NOT_FINITE:
            return mean_(r.comm, r.x.clone()).wait()
        return r.comm.broadcast_(r.x.clone(), least & _RANKS).wait()
