# SPDX-License-Identifier: Apache-2.0
"""Elastic workers as Ray actors: `run(loop, config, workers=4)`, where `loop` calls `attach(..., elastic=True)`."""

# Ray is too large to be installed only so that types can be checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.core.comm.rendezvous import host_store
from thinwire.elastic.records import TOKEN
from thinwire.errors import CommTimeoutError, ConfigError, PeerLostError
from thinwire.integrations.session import needs

with needs("ray[train]"):
    import ray
    from ray.exceptions import RayActorError

_LOGGER = logging.getLogger("thinwire")
_LOST = (RayActorError, PeerLostError, CommTimeoutError)


class _Worker:
    """Runs the loop in a process of its own, whose environment says which run it belongs to."""

    def ready(self) -> None:
        """Returns as soon as the actor has its resources."""

    def run(self, loop: Callable[[Any], Any], config: Any, environment: Mapping[str, str]) -> Any:
        """Return what the loop returns."""
        os.environ.update(environment)
        return loop(config)


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
    wanted: dict[str, Any] = {"num_cpus": 1, **(resources or {})}
    make: Any = ray.remote(**wanted)(_Worker)  # Ray's types take the class for a function
    actors: dict[Any, tuple[int, Any]] = {}  # by what they will return
    results: dict[int, Any] = {}

    def start(rank: int) -> Any:
        actor = make.remote()
        # An actor's calls run one after another, so this one must come first.
        ready = actor.ready.remote()
        actors[actor.run.remote(loop, config, {**environment, "THINWIRE_RANK": str(rank)})] = (rank, actor)
        return ready

    try:
        started = [start(rank) for rank in range(workers)]
        _, late = ray.wait(started, num_returns=workers, timeout=start_seconds)
        if late:
            cluster = ray.cluster_resources()
            has = ", ".join(f"{n} {cluster.get(n, 0):g}" for n in ("CPU", "GPU", *wanted.get("resources", {})))
            raise CommTimeoutError(
                f"{len(late)} of {workers} actors have not started within {start_seconds:g} s: each asks for "
                f"{wanted}, and the whole cluster has {has}. Ask for less, or raise start_seconds"
            )
        while actors:
            done, _ = ray.wait(list(actors), num_returns=1, timeout=last_seconds if results else None)
            if not done:
                break
            rank, _ = actors.pop(done[0])
            try:
                results[rank] = ray.get(done[0])
            except _LOST as error:
                # A run that has ended, or that has no workers left, cannot be joined.
                again = restarts > 0 and not results and bool(actors)
                _LOGGER.warning("worker %s is lost%s (%s)", rank, "; another one joins" if again else "", _brief(error))
                if again:
                    restarts -= 1
                    start(rank)
    finally:
        for _, actor in actors.values():
            ray.kill(actor)
    if not results:
        raise PeerLostError(f"all {workers} actors were lost. Give more restarts, or save and resume")
    return results


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
