# SPDX-License-Identifier: Apache-2.0
"""How one worker enters an elastic run: which store, under which id, as which of how many."""

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
    """One worker's way into an elastic run.

    Attributes:
        membership: agrees with the others on views.
        connector: opens the connections of each view.
        rank: of this worker, if the run begins.
        size: the number of workers that the run begins with.
        entered: the run that the environment names, and how many this process had entered before; None of others.
    """

    membership: Membership
    connector: Connector
    rank: int
    size: int
    entered: tuple[str, int] | None = None

    def withdraw(self) -> None:
        """Leave, as this worker could not start in the run; the next attach of this process enters the same run."""
        self.membership.withdraw()
        if self.entered is not None:
            run, before = self.entered
            if _entered[run] == before + 1:  # it has entered no other one since
                _entered[run] = before


def fleet_from_environment(store: Any = None, *, timeout: float = 60.0) -> Fleet:
    """This process's way into the run that its environment names.

    The variables: `THINWIRE_STORE`, the address of the store, unless torchrun's agent hosts one; `THINWIRE_RUN`, the
    name of the run in it; `THINWIRE_WORKERS`, how many workers the run begins with (`WORLD_SIZE` unless given), and
    `THINWIRE_RANK`, which of them this is (`RANK` unless given). `THINWIRE_TOKEN` is a secret of the run, the same on
    all workers, by which they tell their records in the store from those of others; without it the first worker draws
    one and publishes it in the store.

    Args:
        store: a `torch.distributed.Store` that outlives every worker; None takes the one that the variables name.
        timeout: for the store and the other workers to answer, in seconds.

    Raises:
        ConfigError: no store is named that outlives the workers, or a variable is no number.
        CommTimeoutError: the store cannot be reached.
    """
    size = _number("THINWIRE_WORKERS", _number("WORLD_SIZE", 1))
    rank = _number("THINWIRE_RANK", _number("RANK", 0))
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size} workers: THINWIRE_RANK (or RANK) must lie in 0..{size - 1}")
    run = os.environ.get("THINWIRE_RUN", "run")
    if "THINWIRE_STORE" not in os.environ and store is None:
        # A torchrun agent that has started its workers again begins a new run with them.
        run += f"-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    # A process may attach several models, one after the other; each is a run of its own.
    before = _entered[run]
    views = view_store(f"thinwire/elastic/{run}/{before}", store, several=size > 1, timeout=timeout)
    try:
        token = within(timeout, lambda: run_token(cast(ViewStore, views)))
    except (RuntimeError, OSError) as error:  # TimeoutError too
        first = (str(error) or "no answer").splitlines()[0][:200]
        raise CommTimeoutError(f"the store of workers does not answer within {timeout:g} s ({first})") from None
    _entered[run] += 1  # not before, as one that failed is tried again
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
