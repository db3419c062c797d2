# SPDX-License-Identifier: Apache-2.0
"""A comm over a subset of the ranks; all ranks make the same calls, each within its subset."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Work
from thinwire.errors import ConfigError


class Members(Comm):
    """The ranks of one of several disjoint sets of equal size that together cover all ranks.

    Every call is one or two all-to-alls of all ranks, in which a rank sends nothing to ranks of other sets.

    Args:
        whole: the comm of all ranks.
        ranks: the ranks of the set, ascending, including this rank.

    Example:
        >>> import torch
        >>> from thinwire import Comm, run_threads
        >>> from thinwire.core.comm.members import Members
        >>> def work(comm: Comm) -> float:
        ...     pair = Members(comm, [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1])
        ...     return pair.all_reduce_(torch.tensor([float(comm.rank)])).wait().item()
        >>> run_threads(4, work)
        [1.0, 1.0, 5.0, 5.0]
    """

    def __init__(self, whole: Comm, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(whole.rank), len(ranks), timeout=whole.timeout)
        self.whole, self.ranks, self.step, self.runtime = whole, tuple(ranks), whole.step, whole.runtime

    def name(self, rank: int) -> str:
        """Return the name of a rank of the set in the whole comm."""
        return self.whole.name(self.ranks[rank])

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        sent, expected = [xs[0][:0]] * self.whole.size, [0] * self.whole.size
        for rank, x, size in zip(self.ranks, xs, sizes, strict=True):
            sent[rank], expected[rank] = x, size
        received = self.whole.all_to_all(sent, expected)
        return received.then(lambda each: [each[rank] for rank in self.ranks])

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        return self._all_to_all([x] * self.size, [x.numel()] * self.size)

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        parts = list(x.tensor_split(self.size))
        scattered = self._all_to_all(parts, [parts[self.rank].numel()] * self.size)

        def finish() -> Tensor:
            total = reduce(torch.add, scattered.wait())
            gathered = self._all_to_all([total] * self.size, [part.numel() for part in parts]).wait()
            for part, found in zip(parts, gathered, strict=True):
                part.copy_(found)
            return x

        return Work(finish)

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        return self._all_gather(x).then(lambda rows: x.copy_(rows[src]))

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        return self.whole.send_recv(x, [self.ranks[rank] for rank in dst], [self.ranks[rank] for rank in src])


def check_nodes(node_size: int, size: int) -> None:
    """Check that the number of workers fills whole nodes.

    Raises:
        ConfigError: it does not.
    """
    if size % node_size:
        raise ConfigError(
            f"node_size={node_size} with {size} workers: ranks do not fill whole nodes. Use a divisor of {size}"
        )


def node_and_peers(comm: Comm, node_size: int) -> tuple[Members, Members]:
    """Return comms of the ranks on this rank's node, and of the ranks with the same position on all nodes.

    Raises:
        ConfigError: the ranks do not fill whole nodes.
    """
    check_nodes(node_size, comm.size)
    first, place = comm.rank - comm.rank % node_size, comm.rank % node_size
    return Members(comm, range(first, first + node_size)), Members(comm, range(place, comm.size, node_size))
