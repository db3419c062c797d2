# SPDX-License-Identifier: Apache-2.0
"""A participant for each replica whose strategy works with a quorum."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.asynchronous.quorum.messages import HEADER_BYTES, ControlMessage, Kind, control_length
from thinwire.asynchronous.quorum.participant import Participant
from thinwire.asynchronous.quorum.reductions import Partition
from thinwire.asynchronous.quorum.rules import QuorumRule
from thinwire.core.comm.counting import CountingComm
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError

_participants: WeakKeyDictionary[Replica, Participant | CountingParticipant] = WeakKeyDictionary()


class CountingParticipant:
    """A rank that is always in time, with as few members as possible, on a comm that only counts.

    Args:
        r: the replica, on a `CountingComm`.
        rule: decides for how many ranks to wait.
        coordinator: the rank that decides.
    """

    def __init__(self, r: Replica, rule: QuorumRule, *, coordinator: int) -> None:
        self._comm, self._coordinator = r.comm, coordinator
        self._partition = Partition(r.x.numel(), rule.least, r.x.dtype)
        self._members = tuple(sorted((r.comm.rank + offset) % r.comm.size for offset in range(rule.least)))
        self.outcome: ControlMessage | None = None

    def contribute(self, gradient: Tensor) -> ControlMessage:
        """Count the messages of a step; the gradient is unchanged."""
        rank, size = self._comm.rank, self._comm.size
        others = [member for member in self._members if member != rank]
        control = torch.empty(control_length(size), dtype=torch.int64, device="meta")
        if self._coordinator == rank:
            for _ in range(2):  # READY and ACK from each member, START and COMMIT to it
                self._comm.send_recv(control, others, others).wait()
        else:
            for _ in range(2):
                self._comm.send_recv(control, [self._coordinator], [self._coordinator]).wait()
        chunk = torch.empty(HEADER_BYTES + self._partition.nbytes, dtype=torch.uint8, device="meta")
        for _ in range(2):  # the members' own parts, then their means
            self._comm.send_recv(chunk, others, others).wait()
        self.outcome = ControlMessage(Kind.COMMIT, self._comm.step, 1, members=self._members)
        return self.outcome

    def is_member(self, outcome: ControlMessage) -> bool:
        """Return True."""
        return outcome.kind is Kind.COMMIT

    @property
    def lost(self) -> list[int]:
        """Return an empty list."""
        return []

    def recover(self) -> None:
        """Do nothing: this rank is never late."""

    def end_step(self) -> None:
        """Clear the outcome."""
        self.outcome = None

    def barrier(self) -> None:
        """Do nothing: no other rank exists."""


def open_participant(
    r: Replica, rule: QuorumRule, *, coordinator: int, retry_seconds: float, names: Sequence[str]
) -> None:
    """Open a quorum of all ranks' replicas; `participant_of(r)` then returns this rank's side.

    Args:
        r: the replica.
        rule: decides for how many ranks to wait, and how long.
        coordinator: the rank that decides.
        retry_seconds: the least time before a waiting rank sends READY again.
        names: entries of the replica's state that a late rank must receive.

    Raises:
        ConfigError: `r` is a part of a replica, or `Comm.open_mailbox` fails.
    """
    if isinstance(r.comm, CountingComm):
        _participants[r] = CountingParticipant(r, rule, coordinator=coordinator)
    else:
        _participants[r] = Participant(r, rule, coordinator=coordinator, retry_seconds=retry_seconds, names=names)


def participant_of(r: Replica) -> Participant | CountingParticipant:
    """Return the participant that was opened for a replica.

    Raises:
        ConfigError: none was opened.
    """
    if r not in _participants:
        raise ConfigError(
            "no quorum is open for this replica. Attach the model to the strategy itself, not to a wrapper"
        )
    return _participants[r]
