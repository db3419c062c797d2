# SPDX-License-Identifier: Apache-2.0
"""A replica's mailbox, for strategies that send messages to single ranks without a common schedule."""

from collections.abc import Callable, Sequence
from weakref import proxy

import torch
from torch import Tensor

from thinwire.core.comm.mailbox.base import Mailbox, Message
from thinwire.core.replica.replica import Replica


def open_mailbox(r: Replica, like: Tensor, *, capacity: int = 4) -> Mailbox:
    """Open the mailbox of a replica, on all ranks together; `r.comm.mailbox(r)` returns it later.

    Args:
        r: the replica.
        like: a vector as long as the longest message.
        capacity: unconsumed messages allowed from one rank to another.

    Raises:
        ConfigError: as `Comm.open_mailbox`.
    """
    return r.comm.open_mailbox(r, like, capacity=capacity)


def on_message(
    r: Replica,
    topic: int,
    handler: Callable[[Replica, Mailbox, Message], bool],
    *,
    like: Tensor,
    src: Sequence[int],
) -> None:
    """Register the handler of a topic at a replica's mailbox, as `Mailbox.on_message` does.

    The handler is also called with the replica and the mailbox, and keeps neither of them alive.
    """
    box = r.comm.mailbox(r)
    replica, mailbox = proxy(r), proxy(box)
    box.on_message(topic, lambda message: handler(replica, mailbox, message), like=like, src=src)


def number(value: int) -> Tensor:
    """Make a message of one integer, of 8 bytes."""
    return torch.tensor([value], dtype=torch.int64, device="cpu")


def others(r: Replica) -> list[int]:
    """Return all other ranks, starting with the next one."""
    return [(r.comm.rank + offset) % r.comm.size for offset in range(1, r.comm.size)]
