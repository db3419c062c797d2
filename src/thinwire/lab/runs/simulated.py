# SPDX-License-Identifier: Apache-2.0
"""Training runs on simulated workers: the numbers of real runs, and the times of a simulated network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.lab.emulate import parse_links
from thinwire.lab.runs.folder import Fields, RunFolder
from thinwire.lab.runs.launcher import Listener, ignore_event
from thinwire.lab.runs.recipes import parse_recipe
from thinwire.lab.runs.settings import Settings
from thinwire.lab.runs.worker import work_virtually
from thinwire.methods.strategies.base import Strategy
from thinwire.planning.plan.networks import network_of_links
from thinwire.planning.plan.predict import ModelTime
from thinwire.planning.simulate import Network, SimulatedComm, simulate


@dataclass(frozen=True)
class SimulatedRuns:
    """Makes runs on simulated workers, as `launch` makes them on processes.

    Args:
        step: how long a training step takes without communication.
        network: rates, latencies and slow workers; that of the settings' links unless given.
    """

    step: ModelTime
    network: Network | None = None

    def __call__(self, settings: Settings, folder: Path, *, listener: Listener = ignore_event) -> Fields:
        """Run all workers of one training run here, in virtual time, and return its summary.

        Raises:
            ConfigError: the folder holds a run already or cannot be created, or the settings cannot be simulated.
            ThinwireError: what ended the run.
        """
        check_simulated(settings, [settings.strategy])
        home = RunFolder(folder)
        home.create()
        home.write_settings(settings)
        network = self.network or network_of_links(parse_links(settings.link or "none", settings.workers))

        def work(comm: SimulatedComm) -> Fields | None:
            return work_virtually(settings, folder, comm, self.step, emit=listener)

        ended = simulate(settings.workers, work, network=network, seed=settings.seed, timeout=settings.timeout)
        for failure in ended.failures.values():
            raise failure
        if ended.died or ended.results[0] is None:
            raise ConfigError(f"{folder}: workers {sorted(ended.died)} have died. Use thinwire simulate for faults")
        return ended.results[0]


def check_simulated(settings: Settings, recipes: Sequence[str]) -> None:
    """Refuse what has no virtual time.

    Raises:
        ConfigError: with the setting or the recipe, and the fix.
    """
    for recipe in recipes:
        if not isinstance(parse_recipe(recipe), Strategy):
            raise ConfigError(
                f"{recipe} is torch's own method, whose code cannot be simulated. Leave it out, or compare without "
                "--simulate. AllReduce() does what ddp does"
            )
    if settings.elastic:
        raise ConfigError("elastic=True: simulated workers cannot be lost. Leave it out, or compare without --simulate")
    if settings.stop is not None:
        raise ConfigError(f"stop={settings.stop!r}: suspends processes. Give pauses in a network file of --network")
