"""Who leads: every worker brings one number, and the least finite one wins.

A ballot is a whole number of 64 bits: the score, as bits that are ordered as scores are, above the rank. The least of
all ballots therefore names the best worker, and the lowest rank among equals; scores that are NaN or infinite come
after all others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Literal

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.errors import ConfigError
from thinwire.replica.replica import Replica, as_number

_LOW_BITS = 0x7FFFFFFF
_NOT_FINITE = 0x7F800000
_SILENT = 0x7FFFFFFF
_RANKS = 0xFFFFFFFF
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES, _CHUNKS = 1 << 15, 1 << 20, 16


class ScoreFunction:
    """What workers are compared by, computed by the caller; less is better.

    A forward pass over the same few examples on all ranks compares parameters and not the luck of batches.

    Args:
        compute: given the replica, returns one number, as a tensor on the device of the parameters or as a float.
        name: tells recipes apart; equal on all ranks. A recipe with a metric cannot be read back from its text.
    """

    def __init__(self, compute: Callable[[Replica], Tensor | float], name: str = "probe") -> None:
        self._compute = compute
        self._name = name

    def __repr__(self) -> str:
        return f"ScoreFunction({self._name!r})"

    def __call__(self, r: Replica) -> Tensor:
        """This worker's number.

        Raises:
            ConfigError: it is not one number, or lies on another device than the parameters.
        """
        value = self._compute(r)
        if isinstance(value, Tensor) and value.device != r.x.device:
            raise ConfigError(f"{self}: returned a tensor on {value.device}; compute it on {r.x.device}")
        return as_number(value, r.x, repr(self))


Measure = Literal["window", "ema"] | ScoreFunction


# -- scores ------------------------------------------------------------------------------------------------------------


def start_scores(r: Replica, measure: Measure, length: int) -> None:
    """Make room for a worker's losses, or try its metric out.

    Args:
        r: the replica; its state gains `losses` and `told`.
        measure: "window" is the mean of the last `length` losses, "ema" their exponential mean of that length.
        length: losses that count.

    Raises:
        ConfigError: the metric's answer is of no use.
    """
    if isinstance(measure, ScoreFunction):
        measure(r)
        return
    r.state["losses"] = r.x.new_zeros(length if measure == "window" else 1, dtype=torch.float32)
    r.state["told"] = torch.zeros((), dtype=torch.int64)


def note_loss(r: Replica, measure: Measure, length: int) -> None:
    """Take in what the loop said of this step's loss, if it said anything; nothing is waited for."""
    if r.loss is None or isinstance(measure, ScoreFunction):
        return
    losses, told = r.state["losses"], r.state["told"]
    if measure == "window":
        losses[int(told) % len(losses)] = r.loss
    else:
        # One loss that is not finite must not stay for good.
        fresh = (told == 0).to(losses.device) | ~torch.isfinite(losses)
        losses.copy_(torch.where(fresh, r.loss, losses.lerp(r.loss.expand(1), 1 / length)))
    told += 1


def score_of(r: Replica, measure: Measure) -> Tensor | None:
    """A worker's score; None where it was told nothing yet."""
    if r.x.is_meta:
        return torch.zeros(())
    if isinstance(measure, ScoreFunction):
        return measure(r)
    losses = _losses_of(r)
    return losses.mean() if len(losses) else None


def standard_error(r: Replica) -> Tensor:
    """The standard error of a window's mean, as far as one can tell; infinite before the second loss."""
    losses = _losses_of(r)
    return losses.std() / len(losses) ** 0.5 if len(losses) > 1 else r.x.new_full((), inf, dtype=torch.float32)


def _losses_of(r: Replica) -> Tensor:
    """The part of the window that is filled: a worker with fewer steps must not look better for that."""
    return r.state["losses"][: min(int(r.state["told"]), len(r.state["losses"]))]


# -- ballots -----------------------------------------------------------------------------------------------------------


def ballot(r: Replica, score: Tensor | None) -> Tensor:
    """A worker's vote for itself: int64, [1]."""
    if score is None:
        return torch.full((1,), (_SILENT << 32) | r.comm.rank, device=r.x.device)
    score = score.reshape(1).float() + 0.0  # minus zero is zero
    bits = score.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ _LOW_BITS, bits)
    return (torch.where(torch.isfinite(score), ordered, _NOT_FINITE) << 32) | r.comm.rank


def elect(r: Replica, score: Tensor | None) -> int | None:
    """The rank with the least score of all, by one message of 8 bytes; None where nobody's is finite.

    Raises:
        ConfigError: no worker was ever told a loss; on all ranks.
    """
    return winner([int(r.comm.all_reduce_(ballot(r, score), op="min").wait())])


def winner(ballots: Sequence[int]) -> int | None:
    """Whom the least of some ballots names; None where none of their scores is finite.

    Raises:
        ConfigError: none of these workers was ever told a loss.
    """
    least = min(ballots)
    if least >> 32 == _SILENT:
        raise ConfigError(
            "no worker knows a loss to be compared by: call worker.record_batch(loss=loss) before optimizer.step(), or "
            "give metric=ScoreFunction(...)"
        )
    return None if least >> 32 == _NOT_FINITE else least & _RANKS


def gather_ballots(r: Replica, score: Tensor | None, members: Sequence[int]) -> Mapping[int, int]:
    """The ballots of some ranks, this one among them, by rank: 8 bytes to each of the others."""
    mine = ballot(r, score)
    others = [rank for rank in members if rank != r.comm.rank]
    received = r.comm.send_recv(mine, others, others).wait()
    found = {rank: int(each) for rank, each in zip(others, received, strict=True)} | {r.comm.rank: int(mine)}
    return {rank: found[rank] for rank in members}


def differs_significantly(r: Replica, certainty: float) -> bool:
    """Whether any worker's window is worse than the best one's by more than chance; 8 bytes to each of the others.

    Args:
        r: the replica.
        certainty: by how many standard errors of the difference.
    """
    score = score_of(r, "window")
    if score is None or r.x.is_meta:
        return True
    rows = torch.stack(r.comm.all_gather(torch.stack([score, standard_error(r)])).wait())
    scores, doubts = rows[:, 0], rows[:, 1]
    if not bool(torch.isfinite(scores).all()):
        return True
    best = scores.argmin()
    return bool((scores - scores[best] > certainty * torch.hypot(doubts, doubts[best])).any())


def start_warning(r: Replica) -> None:
    """Count the rounds without a leader, to speak of the first."""
    r.state["skipped"] = torch.zeros((), dtype=torch.int64)


def warn_once(r: Replica) -> None:
    """Say, the first time, that nobody could be elected."""
    if r.state["skipped"] == 0:
        warnings.warn(
            f"rank {r.comm.rank}, step {r.step}: no worker's loss is finite, so nobody leads and nobody is pulled; "
            "lower the learning rate",
            stacklevel=2,
        )
    r.state["skipped"] += 1


# -- the leader's vector -----------------------------------------------------------------------------------------------


def chain_from(source: int, members: Sequence[int]) -> list[int]:
    """Some ranks in the order in which they pass something on, beginning with `source`."""
    place = members.index(source)
    return [*members[place:], *members[:place]]


def pass_along_(comm: Comm, x: Tensor, chain: Sequence[int]) -> Tensor:
    """Replace `x` on every rank of a chain by that of its first, in pieces; nobody sends it twice.

    Args:
        comm: all ranks; those outside the chain do not call.
        x: a vector.
        chain: ranks, this one among them.
    """
    place = chain.index(comm.rank)
    nbytes = min(_MOST_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, x.numel() * x.element_size() // _CHUNKS))
    pieces = x.split(max(1, nbytes // x.element_size()))
    arriving = [comm.send_recv(piece, [], [chain[place - 1]]) for piece in pieces] if place else []
    leaving = [comm.send_recv(piece, [chain[1]], []) for piece in pieces] if not place and len(chain) > 1 else []
    for piece, work in zip(pieces, arriving, strict=False):
        piece.copy_(work.wait()[0])
        if place < len(chain) - 1:
            leaving.append(comm.send_recv(piece, [chain[place + 1]], []))
    for work in leaving:
        work.wait()
    return x


def pass_between_nodes_(comm: Comm, x: Tensor, source: int, node_size: int) -> Tensor:
    """Replace `x` on every rank by that of `source`, which enters each other node of consecutive ranks once."""
    place, first = source % node_size, comm.rank - comm.rank % node_size
    column = list(range(place, comm.size, node_size))
    if comm.rank in column:
        pass_along_(comm, x, chain_from(source, column))
    return pass_along_(comm, x, chain_from(first + place, range(first, first + node_size)))


def leader_s(r: Replica, leader: int) -> Tensor:
    """The parameters of the leader, on every rank: its own are `r.x` itself, those of others a new vector."""
    x = r.x if r.comm.rank == leader else torch.empty_like(r.x)
    return r.comm.broadcast_(x, leader).wait()


def leader_or_mean(r: Replica, score: Tensor | None) -> Tensor:
    """A new vector, equal on all ranks: the best worker's parameters, or their mean where none is best."""
    least = int(r.comm.all_reduce_(ballot(r, score), op="min").wait())
    if least >> 32 >= _NOT_FINITE:
        return r.comm.all_reduce_(r.x.clone()).wait().div_(r.comm.size)
    return r.comm.broadcast_(r.x.clone(), least & _RANKS).wait()
