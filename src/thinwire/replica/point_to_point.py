"""A replica's mailbox, for strategies that send messages to single ranks without a common schedule."""

from torch import Tensor

from thinwire.comm.mailbox.base import Mailbox
from thinwire.errors import ConfigError
from thinwire.replica.replica import PrefixView, Replica


def open_mailbox(r: Replica, like: Tensor, *, capacity: int = 4) -> Mailbox:
    """Open the mailbox of a replica, on all ranks together; `r.comm.mailbox(r)` returns it later.

    Args:
        r: the replica.
        like: a vector as long as the longest message.
        capacity: unconsumed messages allowed from one rank to another.

    Raises:
        ConfigError: `r` is a part of a replica; or as `Comm.open_mailbox`.
    """
    # A part is a new object at every step, so a mailbox that belonged to it would end with the step.
    if isinstance(r.inflight, PrefixView):
        raise ConfigError(
            "a strategy that sends messages cannot be cut into fragments; use it without Streaming, or a base that "
            "averages parameters, such as SlowMo()"
        )
    return r.comm.open_mailbox(r, like, capacity=capacity)
