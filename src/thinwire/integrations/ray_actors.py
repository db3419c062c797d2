# SPDX-License-Identifier: Apache-2.0
"""Ray actors that each run a training loop: started, waited for, and ended."""

# Ray is too large to be installed only so that types can be checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.errors import CommTimeoutError
from thinwire.integrations.session import needs

with needs("ray[train]"):
    import ray


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
        make: Any = ray.remote(**self._resources)(_Worker)  # Ray's types take the class for a function
        actor = make.remote()
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
                f"{self._resources}, and the whole cluster has {has}. Ask for less, or raise start_seconds"
            )

    def close(self) -> None:
        """End all of them."""
        for _, actor in self.actors.values():
            ray.kill(actor)
