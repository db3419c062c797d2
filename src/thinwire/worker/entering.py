# SPDX-License-Identifier: Apache-2.0
"""How `attach` enters an elastic run, and leaves it again where it fails."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch

from thinwire.comm.base import Comm
from thinwire.membership.elastic_comm import ElasticComm
from thinwire.membership.fleet import Fleet, fleet_from_environment
from thinwire.worker.arriving import Offered
from thinwire.worker.elastic import Elastic
from thinwire.worker.handshake import Facts, agree


def enter(elastic: Literal[True] | Fleet, timeout: float) -> Elastic:
    """Enter an elastic run, and connect with the workers of its current view.

    Raises:
        ConfigError: the environment names no store that outlives the workers.
        CommError: the others did not come, or do not take this worker in.
    """
    fleet = fleet_from_environment(timeout=timeout) if elastic is True else elastic
    offered = Offered(fleet.membership, fleet.connector)
    fleet.membership.on_offer = offered.take
    try:
        fleet.membership.enter(fleet.rank, fleet.size)
        views = Elastic(fleet, ElasticComm(timeout=timeout), offered)
        views.connect()
    except BaseException:
        fleet.withdraw()
        raise
    return views


@contextmanager
def leaves_on_failure(views: Elastic | None) -> Generator[ExitStack]:
    """Within it, an error takes an elastic worker out of its run, and runs the callbacks of the stack."""
    on_failure = ExitStack()
    try:
        yield on_failure
    except BaseException:
        if views is not None:
            views.withdraw()
        on_failure.close()
        raise


def agree_with(views: Elastic | None, comm: Comm, facts: Facts, device: torch.device) -> None:
    """Check that all ranks are started alike, and that who joins an elastic run is started as it was.

    Raises:
        MismatchError: with the first difference.
    """
    if views is None:
        agree(comm, facts, device)
    else:
        views.agree(facts, device)
