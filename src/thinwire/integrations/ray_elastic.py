# SPDX-License-Identifier: Apache-2.0
"""Elastic workers as Ray actors: `run(loop, config, workers=4)`, where `loop` calls `attach(..., elastic=True)`."""

# Ray is too large to be installed only so that types can be checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.core.comm.rendezvous import host_store
from thinwire.elastic.records import TOKEN
from thinwire.errors import CommTimeoutError, ConfigError, PeerLostError
from thinwire.integrations.ray_actors import Group
from thinwire.integrations.session import needs

with needs("ray[train]"):
    import ray
    from ray.exceptions import RayActorError

_LOGGER = logging.getLogger("thinwire")
_LOST = (RayActorError, PeerLostError, CommTimeoutError)


def run(
    loop: Callable[[Any], Any],
    config: Any = None,
    *,
    workers: int,
    restarts: int = 0,
    resources: Mapping[str, Any] | None = None,
    start_seconds: float = 300.0,
    last_seconds: float = 60.0,
) -> dict[int, Any]:
    """Run a training loop in actors of which each may be lost: the others train on, and a new one joins in its place.

    The calling process hosts the store in which the workers agree on who they are, on its node's address, so it must be
    part of the cluster (no Ray client), and its end ends the run.

    Args:
        loop: called with `config` in every actor; it calls `attach(..., elastic=True)`, and ends by
            `worker.step`.
        config: the loop's argument.
        workers: actors at the start.
        restarts: how many actors are started in the place of lost ones, all together.
        resources: options of `ray.remote`, such as `{"num_cpus": 2}`; one CPU each unless given.
        start_seconds: how long the first actors may take to start; a cluster without room for them never starts them.
        last_seconds: how long the others may take after the first one has reached the end, before they are killed.

    Returns:
        What the loop returned, by rank, of the actors that reached the end.

    Raises:
        ConfigError: a number is out of its range.
        CommTimeoutError: actors have not started in time.
        PeerLostError: all actors were lost.
        Exception: what the loop raises in an actor, other than that it has lost the others; all actors are ended.
    """
    if start_seconds <= 0 or last_seconds <= 0:
        raise ConfigError(f"start_seconds={start_seconds}, last_seconds={last_seconds}: must be positive")
    if workers < 1 or restarts < 0:
        raise ConfigError(f"workers={workers}, restarts={restarts}: must be at least 1 and 0")
    if not ray.is_initialized():
        ray.init()
    address = ray.util.get_node_ip_address()
    store = host_store(address, 0)  # lives as long as this call
    environment = {
        "THINWIRE_STORE": f"{address}:{store.port}",
        "THINWIRE_WORKERS": str(workers),
        TOKEN: secrets.token_hex(16),
    }
    group = Group(loop, config, environment, {"num_cpus": 1, **(resources or {})})
    results: dict[int, Any] = {}
    try:
        for rank in range(workers):
            group.start(rank)
        group.wait_for_all(start_seconds)
        while group.actors:
            done, _ = ray.wait(list(group.actors), num_returns=1, timeout=last_seconds if results else None)
            if not done:
                break
            rank, _ = group.actors.pop(done[0])
            try:
                results[rank] = ray.get(done[0])
            except _LOST as error:
                # A run that has ended, or that has no workers left, cannot be joined.
                again = restarts > 0 and not results and bool(group.actors)
                _LOGGER.warning("worker %s is lost%s (%s)", rank, "; another one joins" if again else "", _brief(error))
                if again:
                    restarts -= 1
                    group.start(rank)
    finally:
        group.close()
    if not results:
        raise PeerLostError(f"all {workers} actors were lost. Give more restarts, or save and resume")
    return results


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
