"""Which batch comes next, so that what a late worker could not contribute is seen all the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from thinwire.errors import ConfigError
from thinwire.quorum.log import memberships
from thinwire.replica.replica import Replica


class ElasticSampler:
    """Deals the batches of a data set to all workers, and deals those again that were dropped.

    Each epoch is a permutation of its own. At every step the n workers get the next n batches; those of workers that
    were late go back to the front of the row. So every batch counts once before the next epoch's last ones are dealt,
    however slow some worker always is. It is a function of the seed and of who was a member of which step, which all
    workers know: nothing is sent for it.

    Args:
        batches: in an epoch, at least as many as workers.
        seed: of the permutations, equal on all ranks.

    Raises:
        ConfigError: there are fewer batches than one.
    """

    def __init__(self, batches: int, *, seed: int = 0) -> None:
        if batches < 1:
            raise ConfigError(f"batches={batches}: must be at least 1")
        self._batches, self._seed = batches, seed
        self._restart()

    def batch(self, r: Replica) -> int:
        """The number of the batch, from 0, that this worker's next gradient is to be of.

        Args:
            r: a replica, as in `worker.replicas[0]`.
        """
        if self._step > r.step:
            self._restart()
        for members in memberships(r, self._step):
            dealt = self._deal(r.comm.size)
            self._row.extendleft(reversed([batch for rank, batch in enumerate(dealt) if rank not in members]))
            self._step += 1
        dealt = self._deal(r.comm.size)
        self._row.extendleft(reversed(dealt))
        return dealt[r.comm.rank]

    def until(self, r: Replica, steps: int) -> Iterator[int]:
        """The batches of a whole run: one for each step that this worker takes, until the replica has done `steps`.

        A worker that was late has done the others' steps too, and so takes fewer itself.
        """
        while r.step < steps:
            yield self.batch(r)

    def _restart(self) -> None:
        self._row, self._epoch, self._step = deque[int](), 0, 0

    def _deal(self, count: int) -> list[int]:
        while len(self._row) < count:
            draw = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
            self._row.extend(torch.randperm(self._batches, generator=draw).tolist())
            self._epoch += 1
        return [self._row.popleft() for _ in range(count)]
