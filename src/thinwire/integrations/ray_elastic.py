# SPDX-License-Identifier: Apache-2.0
"""Elastic workers as Ray actors: `run(loop, config, workers=4)`, where `loop` calls `attach(..., elastic=True)`."""

# Ray is too large to be installed only so that types can be checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.comm.rendezvous import host_store
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
        """What the loop returns."""
        os.environ.update(environment)
        return loop(config)


class Group:
    """The actors that run, by what they will return."""

    def __init__(self, loop: Callable[[Any], Any], config: Any, environment: dict[str, str], resources: Any) -> None:
        self._arguments = (loop, config)
        self._environment, self._resources = environment, resources
        self.actors: dict[Any, tuple[int, Any]] = {}
        self._ready: list[Any] = []

    def start(self, rank: int) -> None:
        """Start one more actor."""
        actor = ray.remote(**self._resources)(_Worker).remote()
        environment = {**self._environment, "THINWIRE_RANK": str(rank)}
        # An actor's calls run one after another, so this one must come first.
        self._ready.append(actor.ready.remote())
        self.actors[actor.run.remote(*self._arguments, environment)] = (rank, actor)

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all actors have started, or are lost.

        Raises:
            CommTimeoutError: some have not.
        """
        _, late = ray.wait(self._ready, num_returns=len(self._ready), timeout=seconds)
        if late:
            cluster = ray.cluster_resources()
            has = ", ".join(f"{n} {cluster.get(n, 0):g}" for n in ("CPU", "GPU", *self._resources.get("resources", {})))
            raise CommTimeoutError(
                f"{len(late)} of {len(self.actors)} actors have not started within {seconds:g} s: each asks for "
                f"{self._resources}, and the whole cluster has {has}; ask for less, or raise start_seconds"
            )

    def close(self) -> None:
        """End all of them."""
        for _, actor in self.actors.values():
            ray.kill(actor)


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
    environment = {"THINWIRE_STORE": f"{address}:{store.port}", "THINWIRE_WORKERS": str(workers)}
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
                # Of a run that has ended, or of which nobody is left, there is nothing to join.
                again = restarts > 0 and not results and bool(group.actors)
                _LOGGER.warning("worker %s is lost%s (%s)", rank, "; another one joins" if again else "", _brief(error))
                if again:
                    restarts -= 1
                    group.start(rank)
    finally:
        group.close()
    if not results:
        raise PeerLostError(f"all {workers} actors were lost; give more restarts, or save and resume")
    return results


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
