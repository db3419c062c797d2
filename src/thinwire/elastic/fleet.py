# SPDX-License-Identifier: Apache-2.0
"""The entry of one worker into an elastic run: its store, its id and its rank."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from thinwire.core.comm.rendezvous import view_store
from thinwire.core.comm.roll_call import within
from thinwire.core.comm.view_group import GlooConnector
from thinwire.elastic.elastic_comm import Connector
from thinwire.elastic.membership import Membership
from thinwire.elastic.records import ViewStore, hidden, run_token
from thinwire.errors import CommTimeoutError, ConfigError

_entered: Counter[str] = Counter()


@dataclass(frozen=True)
class Fleet:
    """The entry of one worker into an elastic run.

    Attributes:
        membership: agrees on views with the other workers.
        connector: opens the connections of each view.
        rank: the rank of this worker, if the run starts.
        size: the number of workers at the start of the run.
        entered: the run of the environment, and how many runs this process had entered before; None without one.
    """

    membership: Membership
    connector: Connector
    rank: int
    size: int
    entered: tuple[str, int] | None = None

    def withdraw(self) -> None:
        """Leave because this worker could not start; the next attach of this process enters the same run."""
        self.membership.withdraw()
        if self.entered is not None:
            run, before = self.entered
            if _entered[run] == before + 1:  # no other run was entered since
                _entered[run] = before


def fleet_from_environment(store: Any = None, *, timeout: float = 60.0) -> Fleet:
    """Make the entry of this process into the run of its environment.

    The variables: `THINWIRE_STORE`, the address of the store, unless torchrun's agent hosts one; `THINWIRE_RUN`, the
    name of the run in it; `THINWIRE_WORKERS`, the number of workers at the start (default `WORLD_SIZE`); and
    `THINWIRE_RANK`, this worker's rank at the start (default `RANK`). `THINWIRE_TOKEN` is a secret of the run, the same
    on all workers. It distinguishes their records in the store from foreign ones. Without it the first worker draws one
    and publishes it in the store.

    Args:
        store: a `torch.distributed.Store` that outlives every worker; None uses the store of the variables.
        timeout: the limit for answers of the store and the other workers, in seconds.

    Raises:
        ConfigError: no store outlives the workers, or a variable is not a number.
        CommTimeoutError: the store cannot be reached.
    """
    size = _number("THINWIRE_WORKERS", _number("WORLD_SIZE", 1))
    rank = _number("THINWIRE_RANK", _number("RANK", 0))
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size} workers: THINWIRE_RANK (or RANK) must lie in 0..{size - 1}")
    run = os.environ.get("THINWIRE_RUN", "run")
    if "THINWIRE_STORE" not in os.environ and store is None:
        # A torchrun agent that restarts its workers starts a new run with them.
        run += f"-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    # A process may attach several models, one after the other; each is a separate run.
    before = _entered[run]
    views = view_store(f"thinwire/elastic/{run}/{before}", store, several=size > 1, timeout=timeout)
    try:
        token = within(timeout, lambda: run_token(cast(ViewStore, views)))
    except (RuntimeError, OSError) as error:  # TimeoutError too
        first = (str(error) or "no answer").splitlines()[0][:200]
        raise CommTimeoutError(f"the store of workers does not answer within {timeout:g} s ({first})") from None
    _entered[run] += 1  # not earlier, since a failed entry is repeated
    membership = Membership(views, f"{rank}-{secrets.token_hex(4)}", timeout=timeout, token=token)
    connector = GlooConnector(views, lambda name: hidden(token, name))
    return Fleet(membership, connector, rank, size, (run, before))


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return otherwise
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: must be a whole number")
    return int(text)
