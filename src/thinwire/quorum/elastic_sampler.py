# SPDX-License-Identifier: Apache-2.0
"""Which batch each worker computes next, so that batches whose gradients were dropped are used all the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from thinwire.errors import ConfigError
from thinwire.quorum.log import memberships
from thinwire.replica.replica import Replica


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

    def until(self, r: Replica, steps: int) -> Iterator[int]:
        """The batches of a run: one for each step that this worker takes, until the replica has done `steps`.

        A worker that recovers from being late skips the steps that it missed, so it takes fewer itself.
        """
        while r.step < steps:
            yield self.batch(r)

    def _restart(self) -> None:
        self._queue, self._epoch, self._step = deque[int](), 0, 0

    def _next(self, count: int) -> list[int]:
        while len(self._queue) < count:
            rng = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
            self._queue.extend(torch.randperm(self._batches, generator=rng).tolist())
            self._epoch += 1
        return [self._queue.popleft() for _ in range(count)]
