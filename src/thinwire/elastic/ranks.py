# SPDX-License-Identifier: Apache-2.0
"""The ranks of an elastic worker that is a group, such as the ranks that hold the shards of one model under FSDP2.

A group is one member of the run. Its ranks share an id, and only the first rank writes records of the group. Rank r of
a group exchanges messages with rank r of every other group. So a message may fail on some ranks of a group only. The
ranks agree after everything that may fail, before the group registers anything or continues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from thinwire.core.comm.base import Comm, named
from thinwire.errors import CommTimeoutError, PeerLostError
from thinwire.worker.handshake import gather_texts

T = TypeVar("T")


class GroupLostError(PeerLostError):
    """A rank of this worker's own group is lost."""


class Ranks:
    """The ranks of this worker's group.

    Args:
        comm: of these ranks, for tensors in host memory; later waits end with its timeout.
        worker: the id of the group.
    """

    def __init__(self, comm: Comm, worker: str) -> None:
        self.comm = comm
        self.worker = worker

    def gather(self, *numbers: int) -> list[list[int]]:
        """Return the numbers of each rank, which all must call.

        Raises:
            GroupLostError: a rank is lost, or does not answer.
        """
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return [row.tolist() for row in self._all(lambda: self.comm.all_gather(mine).wait())]

    def texts(self, text: str) -> list[str]:
        """Return the text of each rank, which all must call.

        Raises:
            GroupLostError: a rank is lost, or does not answer.
        """
        found = self._all(lambda: gather_texts(self.comm, text.encode(), torch.device("cpu")))
        return [each.decode() for each in found]

    def _all(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (PeerLostError, CommTimeoutError) as error:
            problem = str(error)
        # Outside the handler: a traceback would keep the connections open.
        raise GroupLostError(self.in_words(problem))

    def in_words(self, problem: str) -> str:
        """Return the error of a group that has lost a rank."""
        lost = [rank for rank in range(self.comm.size) if rank != self.comm.rank and self.comm.has_ended(rank)]
        return (
            f"worker {self.worker}, a group of {self.comm.size} ranks, has lost {named(lost) if lost else 'a rank'} "
            f"({problem}). Its model is no longer complete, so the group ends, and the other workers continue. Start "
            "all ranks of this group again to let it join"
        )
