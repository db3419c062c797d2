# SPDX-License-Identifier: Apache-2.0
"""One bit of what ranks gather is flipped on the way, as drawn from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tests.battery.cases import CODECS
from thinwire import Codec, Comm, CommError, Complete, ErrorFeedback, NonFiniteError, Replica, SketchedSGD, run_threads
from thinwire.core.comm.pending import PendingMeans
from thinwire.core.comm.threads import Hub, ThreadComm
from thinwire.core.comm.work import Work
from thinwire.methods.codecs.base import MatrixCodec
from thinwire.methods.codecs.header import HEADER_BYTES
from thinwire.methods.reduce.compressed_all_reduce import compressed_exchange, two_stage_mean_

SIZE, LENGTH = 3, 96
# Others take means in their own way.
VECTORS = [each.codec for each in CODECS if not (each.codec.traits.own_mean or isinstance(each.codec, MatrixCodec))]
Call = Literal["all-to-all", "all-gather", "send and receive"]
What = Literal["mean", "exchange", "largest entries"]
CALLS: dict[What, tuple[Call, ...]] = {
    "mean": ("all-to-all", "all-gather"),
    "exchange": ("send and receive",),
    "largest entries": ("all-gather",),
}
NAMES = {"mean": "compressed mean", "exchange": "compressed exchange", "largest entries": "largest entries"}


@dataclass(frozen=True)
class Flip:
    """Which bit, of which message, of which exchange.

    Attributes:
        seed: of the draw.
        what: a mean of means in two stages, an exchange with neighbours, or `SketchedSGD`'s largest entries.
        codec: of the payloads.
        call: the call that the message is of.
        src: the sender of the message.
        dst: the rank whose copy is flipped; None flips what is sent, where all ranks get their own message of it.
        bit: which bit, from the message's begin; taken modulo its length.
        count: how many means finish together; the flip is in the last, so that an earlier one would be applied first.
        bad: a rank whose vector is not finite, if one has such.
    """

    seed: int
    what: What
    codec: Codec
    call: Call
    src: int
    dst: int | None
    bit: int
    count: int
    bad: int | None

    @property
    def seen_by(self) -> list[int]:
        """The ranks that get a flipped message, or all where one that sees it tells the others before they apply it."""
        if self.what == "mean" and self.call == "all-to-all":
            return list(range(SIZE))
        others = [rank for rank in range(SIZE) if rank != self.src or self.call == "all-gather"]
        return others if self.dst is None else [self.dst]


@dataclass
class Outcome:
    """What came of a flip.

    Attributes:
        errors: by rank.
        changed: the ranks whose residuals changed.
    """

    errors: dict[int, BaseException] = field(default_factory=dict[int, BaseException])
    changed: set[int] = field(default_factory=set[int])


class Flipping(ThreadComm):
    """A comm that flips one bit of a message that this rank sends, or of the copy of it that one rank receives."""

    def __init__(self, hub: Hub, rank: int, flip: Flip) -> None:
        super().__init__(hub, rank, timeout=20)
        self._flip = flip
        self._left = flip.count - 1 if flip.what == "mean" else 0

    def _is_chosen(self, call: Call) -> bool:
        if call != self._flip.call:
            return False
        self._left -= 1
        return self._left == -1

    def _flipped(self, x: Tensor) -> Tensor:
        whole = x.clone().view(torch.uint8)
        bit = self._flip.bit % (8 * whole.numel())
        whole[bit // 8] ^= 1 << bit % 8
        return whole.view(x.dtype)

    def _as_sent(self, x: Tensor) -> Tensor:
        return self._flipped(x) if self._flip.dst is None and self.rank == self._flip.src else x

    def _as_received(self, rows: list[Tensor], src: Sequence[int]) -> list[Tensor]:
        mine = self.rank == self._flip.dst
        return [self._flipped(x) if mine and rank == self._flip.src else x for rank, x in zip(src, rows, strict=True)]

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        if not self._is_chosen("all-to-all"):
            return super()._all_to_all(xs, sizes)
        return (
            super()
            ._all_to_all([self._as_sent(x) for x in xs], sizes)
            .then(lambda xs: self._as_received(xs, range(SIZE)))
        )

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        if not self._is_chosen("all-gather"):
            return super()._all_gather(x)
        return super()._all_gather(self._as_sent(x)).then(lambda xs: self._as_received(xs, range(SIZE)))

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        if not self._is_chosen("send and receive"):
            return super()._send_recv(x, dst, src)
        return super()._send_recv(self._as_sent(x), dst, src).then(lambda xs: self._as_received(xs, src))


def drawn(seed: int) -> Flip:
    """The flip of a seed: half of them in headers, half with a vector that is not finite; every codec in turn."""
    draw = random.Random(seed)
    codec = VECTORS[seed % len(VECTORS)]
    what: What = draw.choice(("mean", "mean", "exchange", "largest entries"))
    if what == "exchange" and (isinstance(codec, ErrorFeedback) or codec.traits.residual_after_sum):
        what = "mean"  # `Choco` refuses them
    call, src = draw.choice(CALLS[what]), draw.randrange(SIZE)
    dst = draw.choice([None, *(rank for rank in range(SIZE) if rank != src or what != "exchange")])
    bit = draw.randrange(8 * HEADER_BYTES) if draw.random() < 0.5 else 8 * HEADER_BYTES + draw.randrange(10**6)
    bad = draw.randrange(SIZE) if draw.random() < 0.5 and what != "exchange" else None
    return Flip(seed, what, codec, call, src, dst, bit, draw.choice([1, 2]), bad)


def outcome_of(flip: Flip) -> Outcome:
    """Run three threads, and one more call after it."""
    found = Outcome()
    xs = torch.randn(flip.count, SIZE, LENGTH, generator=torch.Generator().manual_seed(flip.seed))
    if flip.bad is not None:
        xs[0, flip.bad, 5] = torch.nan

    def body(comm: Comm) -> None:
        assert isinstance(comm, ThreadComm)
        comm = Flipping(comm._hub, comm.rank, flip)  # pyright: ignore[reportPrivateUsage]
        vectors = [x[comm.rank].clone() for x in xs]
        state = dict[str, Tensor]()
        try:
            EXCHANGES[flip.what](comm, flip, vectors, state)
            comm.all_reduce_(torch.zeros(1)).wait()  # the next call
        except Exception as error:
            found.errors[comm.rank] = error
            if any(bool(x.any()) for x in state.values()):
                found.changed.add(comm.rank)
            raise

    try:
        run_threads(SIZE, body, timeout=20)
    except Exception as error:
        if not found.errors:
            raise AssertionError("no rank has an error of its own") from error
    return found


def _mean(comm: Comm, flip: Flip, vectors: list[Tensor], state: dict[str, Tensor]) -> None:
    pending = PendingMeans()
    works = [
        two_stage_mean_(
            comm, x, flip.codec, state, key=i, offset=i * LENGTH, length=flip.count * LENGTH, pending=pending
        )
        for i, x in enumerate(vectors)
    ]
    for work in works:
        work.wait()


def _exchange(comm: Comm, flip: Flip, vectors: list[Tensor], state: dict[str, Tensor]) -> None:
    compressed_exchange(comm, vectors[0], flip.codec, Complete().peers(comm.rank, SIZE, 0), key=0).wait()


def _largest_entries(comm: Comm, flip: Flip, vectors: list[Tensor], state: dict[str, Tensor]) -> None:
    strategy = SketchedSGD(0.1, recovery="gather", dense_below=0)
    r = Replica(torch.zeros(LENGTH), vectors[0], comm, lr=lambda: 0.1, seed=0)
    strategy.start(r)
    try:
        strategy.before_step(r)
    finally:
        state.update(r.state)


EXCHANGES: dict[What, Callable[[Comm, Flip, list[Tensor], dict[str, Tensor]], None]] = {
    "mean": _mean,
    "exchange": _exchange,
    "largest entries": _largest_entries,
}


def wrong(flip: Flip, found: Outcome) -> str:
    """What is wrong with an outcome, in words; nothing where every rank has an error that says where and why."""
    if sorted(found.errors) != list(range(SIZE)):
        return f"ranks {sorted(set(range(SIZE)) - set(found.errors))} go on"
    if found.changed & set(flip.seen_by):
        return f"ranks {sorted(found.changed & set(flip.seen_by))} have changed their residuals"
    for rank, error in found.errors.items():
        words = str(error)
        if not isinstance(error, CommError | NonFiniteError):
            return f"rank {rank} has an error of another kind: {type(error).__name__}: {words}"
        if re.match(rf"rank {rank}, step 0, {NAMES[flip.what]}: ", words):
            continue
        # Who got the right bytes learns from its next call which rank did not.
        if rank in flip.seen_by or not any(f"rank {other} was lost" in words for other in flip.seen_by):
            return f"rank {rank} does not say what happened: {words}"
    return ""
