"""A replica's mailbox: for strategies that say things to single ranks, at times of their own."""

from torch import Tensor

from thinwire.comm.mailbox.base import Mailbox
from thinwire.errors import ConfigError
from thinwire.replica.replica import Named, Replica


def open_mailbox(r: Replica, like: Tensor, *, capacity: int = 4) -> Mailbox:
    """Open the mailbox of a replica, all ranks together; `r.comm.mailbox(r)` is that one from then on.

    Args:
        r: the replica.
        like: a vector as long as the longest message.
        capacity: messages that may be under way from one rank to another.

    Raises:
        ConfigError: of a part of a replica, which is made anew at every step and so keeps no mailbox; or as
            `Comm.open_mailbox`.
    """
    if isinstance(r.inflight, Named):
        raise ConfigError(
            "a strategy that writes messages cannot be cut into fragments; use it without Streaming, or a base that "
            "averages parameters, such as SlowMo()"
        )
    return r.comm.open_mailbox(r, like, capacity=capacity)
