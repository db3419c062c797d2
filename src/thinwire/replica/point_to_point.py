"""A replica's mailbox, for strategies that send messages to single ranks without a common schedule."""

from torch import Tensor

from thinwire.comm.mailbox.base import Mailbox
from thinwire.replica.replica import Replica


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
