# SPDX-License-Identifier: Apache-2.0
"""Assign batches to workers so that batches with dropped gradients are used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from thinwire.asynchronous.quorum.log import memberships
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.worker.annexes import Elastic
from thinwire.worker.worker import Worker, internals_of

_RECORDED_STEPS = 10_000  # steps whose assignments are kept; earlier ones are computed by replaying the run


@dataclass(frozen=True)
class MembershipInterval:
    """The workers that take part from some step on.

    Attributes:
        begins: the first step whose batches are assigned to them.
        members: their ids, in rank order.
        left: workers that left gracefully before this step; their last batches have been used.
        unused_from: the first step whose batches of workers lost since the previous interval are unused.
    """

    begins: int
    members: tuple[str, ...]
    left: tuple[str, ...] = ()
    unused_from: int = 0


def _views_of(worker: Worker) -> Elastic:
    if worker.elastic is None:
        raise ConfigError("ElasticSampler: this worker has fixed ranks. Use worker.sampler(dataset)")
    return worker.elastic


class ElasticSampler:
    """Assigns the batches of a data set to workers, and reassigns batches whose gradients were dropped.

    Each epoch is a new permutation. At every step the n workers get the next n batches of the queue; batches of late
    workers return to its front. So every batch counts once before the last ones of the next epoch are assigned, however
    slow a worker is. Assignments are a function of the seed and of the members of each step, which all workers know, so
    no message is sent.

    Args:
        batches: batches in an epoch, at least as many as workers.
        seed: the seed of the permutations, equal on all ranks.

    Raises:
        ConfigError: `batches` is less than 1.

    Example:
        >>> import torch
        >>> from thinwire import CountingComm, Replica
        >>> from thinwire.asynchronous.quorum.log import begin_log, write_log
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
        """Return the number of the batch, from 0, for this worker's next gradient.

        Args:
            r: a replica, such as `worker.replicas[0]`.
        """
        if self._step > r.step:
            self._restart()  # an earlier checkpoint was loaded
        for members in memberships(r, self._step):
            assigned = self._next(r.comm.size)
            self._queue.extendleft(reversed([batch for rank, batch in enumerate(assigned) if rank not in members]))
            self._step += 1
        assigned = self._next(r.comm.size)
        self._queue.extendleft(reversed(assigned))
        return assigned[r.comm.rank][1]

    def share(self, worker: Worker) -> int:
        """Return the number of the batch, from 0, for an elastic worker's next gradient.

        At every step the members of the view get the next batches. A lost worker's batches that are in no model, such
        as those since the last average, return to the front of the queue and are assigned again; `lost` lists those
        that are not assigned yet. No message is sent: a joining worker replays the run from the list of views.

        Args:
            worker: the worker returned by `attach(elastic=True)`.

        Example:
            >>> from types import SimpleNamespace
            >>> crews = [MembershipInterval(0, ("a", "b")), MembershipInterval(2, ("a",), unused_from=1)]  # loses b
            >>> def assigned_to(worker_id, steps):
            ...     sampler = ElasticSampler(batches=4)
            ...     views = SimpleNamespace(crews=lambda: crews, worker_id=worker_id)
            ...     return [sampler.share(SimpleNamespace(step=step, elastic=views)) for step in steps]
            >>> a, b = assigned_to("a", range(3)), assigned_to("b", range(2))
            >>> sorted({*a, *b[:1]}), a[2] == b[1]
            ([0, 1, 2, 3], True)
        """
        return self.assignment(worker)[1]

    def assignment(self, worker: Worker) -> tuple[int, int]:
        """Return the epoch, from 0, and the number of the batch that `share` returns.

        Args:
            worker: the worker returned by `attach(elastic=True)`.
        """
        self._replay(worker)
        members = self._crews[-1].members
        assigned = self._next(len(members))
        self._queue.extendleft(reversed(assigned))
        # A worker that is no longer a member has been left out, and learns of it in its next round.
        own = _views_of(worker).worker_id
        return assigned[members.index(own) if own in members else 0]

    def lost(self, worker: Worker) -> dict[int, list[int]]:
        """List the batches, by epoch, of lost workers that are in no model and not assigned again yet.

        The next calls of `share` assign them first. At the end of training, they are the unused batches of each epoch.
        The list is the same on all workers at the same step.

        Args:
            worker: the worker returned by `attach(elastic=True)`.

        Example:
            >>> from types import SimpleNamespace
            >>> crews = [MembershipInterval(0, ("a", "b")), MembershipInterval(3, ("a",), unused_from=1)]
            >>> sampler = ElasticSampler(batches=12)
            >>> def worker(step, crews, worker_id):
            ...     return SimpleNamespace(step=step, elastic=SimpleNamespace(crews=lambda: crews, worker_id=worker_id))
            >>> b = [ElasticSampler(batches=12).share(worker(step, crews[:1], "b")) for step in range(3)]
            >>> sampler.lost(worker(3, crews, "a")) == {0: b[1:]}
            True
            >>> sampler.lost(worker(4, crews, "a")) == {0: b[2:]}
            True
        """
        self._replay(worker)
        found: dict[int, list[int]] = {}
        for each in self._queue:
            if each in self._returned:
                found.setdefault(each[0], []).append(each[1])
        return found

    def _replay(self, worker: Worker) -> None:
        """Assign the batches of all steps before the worker's next one."""
        crews = _views_of(worker).crews()
        known = len(self._crews)
        if (
            self._step > worker.step
            or crews[:known] != self._crews
            or any(
                crew.begins < self._step or crew.unused_from < self._recorded_from for crew in crews[max(known, 1) :]
            )
        ):
            self._restart()
        while True:
            self._change_crew(crews)
            if self._step == worker.step:
                return
            members = self._crews[-1].members
            self._record[self._step] = dict(zip(members, self._next(len(members)), strict=True))
            self._returned.difference_update(self._record[self._step].values())
            self._step += 1
            if len(self._record) > 2 * _RECORDED_STEPS:
                wanted = [crew.unused_from for crew in crews[len(self._crews) :]]
                self._recorded_from = min([self._step - _RECORDED_STEPS, *wanted])
                self._record = {step: row for step, row in self._record.items() if step >= self._recorded_from}

    def _change_crew(self, crews: list[MembershipInterval]) -> None:
        """Requeue the batches of lost workers if an interval starts with this step."""
        last = max(i for i, crew in enumerate(crews) if crew.begins <= self._step)
        for crew in crews[len(self._crews) : last + 1]:
            if self._crews:
                gone = {*self._crews[-1].members} - {*crew.members} - {*crew.left}
                rows = [self._record.get(step, {}) for step in range(crew.unused_from, self._step)]
                unused = [row[each] for row in rows for each in row if each in gone]
                self._queue.extendleft(reversed(unused))
                self._returned.update(unused)
            self._crews.append(crew)

    def until(self, r: Replica, steps: int) -> Iterator[int]:
        """Yield a batch for each step that this worker takes, until the replica has done `steps`.

        A late worker skips the steps that it missed, so it takes fewer steps itself.
        """
        while r.step < steps:
            yield self.batch(r)

    def _restart(self) -> None:
        self._queue, self._epoch, self._step = deque[tuple[int, int]](), 0, 0  # batches as (epoch, number)
        self._crews: list[MembershipInterval] = []
        self._record: dict[int, dict[str, tuple[int, int]]] = {}  # the batch of each member, by step
        self._recorded_from = 0
        self._returned: set[tuple[int, int]] = set()

    def _next(self, count: int) -> list[tuple[int, int]]:
        while len(self._queue) < count:
            rng = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
            permutation = torch.randperm(self._batches, generator=rng, device="cpu").tolist()
            self._queue.extend((self._epoch, number) for number in permutation)
            self._epoch += 1
        return [self._queue.popleft() for _ in range(count)]


def batch_share(worker: Worker) -> range:
    """Return a worker's positions in the global batch of its next step, under `attach(global_batch=...)`.

    Call it before each step: the share follows the number of workers, so that the global batch stays the same. It also
    records the number of samples. Use any number of passes for them, all but the last within `worker.no_sync()`, and
    let the step's loss be the mean over these samples. It sends nothing.

    Args:
        worker: the worker returned by `attach`, elastic or not.

    Raises:
        ConfigError: `attach` got no global batch, or there are more workers than samples.

    Example:
        >>> import torch, thinwire
        >>> from thinwire.elastic.sampler import batch_share
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     worker = thinwire.attach(model, optimizer, "AllReduce()", comm=comm, global_batch=5)
        ...     batch = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
        ...     share = batch_share(worker)
        ...     model(batch[share.start : share.stop]).mean().backward()
        ...     optimizer.step()
        ...     return share, round(model.weight.item(), 4)
        >>> thinwire.run_threads(2, train)
        [(range(0, 3), -3.0), (range(3, 5), -3.0)]
    """
    state = internals_of(worker)
    if state.global_batch is None:
        raise ConfigError("batch_share: attach got no global batch. Use attach(..., global_batch=256)")
    share = state.global_batch.share(state.step, *state.members())
    worker.record_batch(len(share))
    return share
