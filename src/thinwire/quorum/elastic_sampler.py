# SPDX-License-Identifier: Apache-2.0
"""Which batch each worker computes next, so that batches whose gradients were dropped are used all the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from thinwire.errors import ConfigError
from thinwire.quorum.log import memberships
from thinwire.replica.replica import Replica


@dataclass(frozen=True)
class Crew:
    """The workers that take part from some step on.

    Attributes:
        begins: the first step whose batches are dealt to them.
        members: their ids, in the order of ranks.
        left: those that have left with notice before this step; what they were dealt last has been used.
    """

    begins: int
    members: tuple[str, ...]
    left: tuple[str, ...] = ()


class Dealt(Protocol):
    """What the sampler asks of a worker of `attach(elastic=True)`."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def crews(self) -> list[Crew]:
        """Who took part from which step on, the same on all workers."""
        ...

    @property
    def worker_id(self) -> str:
        """Of this worker among the members."""
        ...


class ElasticSampler:
    """Assigns the batches of a data set to workers, and assigns those again whose gradients were dropped.

    Each epoch is a new permutation. At every step the n workers get the next n batches of the queue; those of workers
    that were late return to its front. So every batch counts once before the next epoch's last ones are assigned,
    however slow one worker always is. Assignments are a function of the seed and of the members of each step, which
    all workers know: nothing is sent.

    Args:
        batches: in an epoch, at least as many as workers.
        seed: of the permutations, equal on all ranks.

    Raises:
        ConfigError: `batches` is less than 1.

    Example:
        >>> import torch
        >>> from thinwire import CountingComm, Replica
        >>> from thinwire.quorum.log import begin_log, write_log
        >>> r = Replica(torch.zeros(1), torch.zeros(1), CountingComm(0, 2), lr=lambda: 0.1)
        >>> begin_log(r)
        >>> sampler, assigned = ElasticSampler(batches=3), []
        >>> for batch in sampler.until(r, steps=3):
        ...     assigned.append(batch)
        ...     r.step += 1
        ...     write_log(r, [0])  # rank 1 is always late
        >>> sorted(assigned)
        [0, 1, 2]
    """

    def __init__(self, batches: int, *, seed: int = 0) -> None:
        if batches < 1:
            raise ConfigError(f"batches={batches}: must be at least 1")
        self._batches, self._seed = batches, seed
        self._restart()

    def batch(self, r: Replica) -> int:
        """The number of the batch, from 0, for this worker's next gradient.

        Args:
            r: a replica, as in `worker.replicas[0]`.
        """
        if self._step > r.step:
            self._restart()  # an earlier checkpoint was loaded
        for members in memberships(r, self._step):
            assigned = self._next(r.comm.size)
            self._queue.extendleft(reversed([batch for rank, batch in enumerate(assigned) if rank not in members]))
            self._step += 1
        assigned = self._next(r.comm.size)
        self._queue.extendleft(reversed(assigned))
        return assigned[r.comm.rank]

    def share(self, worker: Dealt) -> int:
        """The number of the batch, from 0, for the next gradient of a worker of `attach(elastic=True)`.

        Every step the members of the view get the next batches. What a lost worker was dealt last returns to the
        front of the queue: it is used again. Nothing is sent: who joins deals the whole run anew, by the list of views.

        Args:
            worker: that `attach` returned.

        Example:
            >>> from types import SimpleNamespace
            >>> crews = [Crew(0, ("a", "b")), Crew(2, ("a",))]  # b is lost in step 1
            >>> def dealt_to(worker_id, steps):
            ...     sampler = ElasticSampler(batches=4)
            ...     worker = lambda step: SimpleNamespace(step=step, crews=crews, worker_id=worker_id)
            ...     return [sampler.share(worker(step)) for step in steps]
            >>> a, b = dealt_to("a", range(3)), dealt_to("b", range(2))
            >>> sorted({*a, *b[:1]}), a[2] == b[1]
            ([0, 1, 2, 3], True)
        """
        crews = worker.crews
        if self._step > worker.step or crews[: len(self._dealt)] != self._dealt:
            self._restart()
        while self._step < worker.step:
            members, later = self._at(crews, self._step).members, self._at(crews, self._step + 1)
            assigned, used = self._next(len(members)), {*later.members, *later.left}
            self._queue.extendleft(
                reversed([batch for each, batch in zip(members, assigned, strict=True) if each not in used])
            )
            self._step += 1
        self._dealt = [crew for crew in crews if crew.begins <= worker.step]
        members = self._at(crews, worker.step).members
        assigned = self._next(len(members))
        self._queue.extendleft(reversed(assigned))
        # One that is not a member of this step's crew any more has been left out, and hears of it in its next round.
        return assigned[members.index(worker.worker_id) if worker.worker_id in members else 0]

    @staticmethod
    def _at(crews: list[Crew], step: int) -> Crew:
        return next(crew for crew in reversed(crews) if crew.begins <= step)

    def until(self, r: Replica, steps: int) -> Iterator[int]:
        """The batches of a run: one for each step that this worker takes, until the replica has done `steps`.

        A worker that recovers from being late skips the steps that it missed, so it takes fewer itself.
        """
        while r.step < steps:
            yield self.batch(r)

    def _restart(self) -> None:
        self._queue, self._epoch, self._step = deque[int](), 0, 0
        self._dealt: list[Crew] = []

    def _next(self, count: int) -> list[int]:
        while len(self._queue) < count:
            rng = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
            self._queue.extend(torch.randperm(self._batches, generator=rng, device="cpu").tolist())
            self._epoch += 1
        return [self._queue.popleft() for _ in range(count)]
