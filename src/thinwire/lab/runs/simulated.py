# SPDX-License-Identifier: Apache-2.0
"""Training runs on simulated workers: the numbers of real runs, and the times of a simulated network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.lab.emulate import Straggler, parse_links, parse_stragglers
from thinwire.lab.runs.engine import ThinwireEngine
from thinwire.lab.runs.folder import Fields, RunFolder
from thinwire.lab.runs.launcher import Listener, ignore_event
from thinwire.lab.runs.recipes import parse_strategy
from thinwire.lab.runs.settings import Settings
from thinwire.lab.runs.worker import Ranks, train
from thinwire.planning.plan.networks import network_of_links
from thinwire.planning.plan.predict import ModelTime
from thinwire.planning.simulate import Network, SimulatedComm, simulate
from thinwire.worker.worker import Worker


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
        slow = parse_stragglers(settings.slow, settings.stall, workers=settings.workers, seed=settings.seed)

        def work(comm: SimulatedComm) -> Fields | None:
            def virtual(engine: ThinwireEngine) -> ThinwireEngine:
                return VirtualEngine(engine.worker, engine.optimizer, comm, self.step, slow[comm.rank])

            return train(settings, folder, Ranks(comm, comm.duplicate()), listener, virtual=virtual)

        ended = simulate(settings.workers, work, network=network, seed=settings.seed, timeout=settings.timeout)
        for failure in ended.failures.values():
            raise failure
        if ended.died or ended.results[0] is None:
            raise ConfigError(f"{folder}: workers {sorted(ended.died)} have died. Use thinwire simulate for faults")
        return ended.results[0]


class VirtualEngine(ThinwireEngine):
    """An engine on a simulated worker: what it computes takes virtual time, and gradients come one after the other.

    Args:
        worker: over a simulated comm.
        optimizer: of the worker's model.
        comm: the simulated comm.
        step: how long a training step takes without communication.
        straggler: how much this worker is slowed down.
    """

    def __init__(
        self, worker: Worker, optimizer: Optimizer, comm: SimulatedComm, step: ModelTime, straggler: Straggler
    ) -> None:
        super().__init__(worker, optimizer)
        self._comm, self._step_time, self._straggler = comm, step, straggler
        self._factor = straggler.factor * comm.slowdown
        self._passed = 0.0  # share of the backward pass
        trained = [p for p in worker.model.parameters() if p.requires_grad]
        for parameter, share in zip(trained, step.ready or _by_elements(trained), strict=True):
            # Before the gradient is added up, which hands it to the strategy.
            parameter.register_hook(self._until(share))

    def backward(self, loss: Tensor) -> None:
        """The forward pass, which has been computed already, takes its time now; then the backward pass does."""
        comm, step = self._comm, self._step_time
        comm.step = self.step
        # The comm slows down what it is told to compute; a stall takes as long on every worker.
        comm.compute(step.forward * self._straggler.factor + self._straggler.stall(self.step) / comm.slowdown)
        self._passed = 0.0
        super().backward(loss)
        self._sleep_until(1.0)

    def update(self) -> None:
        """The optimizer's step, with the strategy's hooks around it."""
        self._comm.sleep(self._step_time.update * self._factor)
        super().update()

    def _until(self, share: float) -> Callable[[Tensor], None]:
        return lambda _: self._sleep_until(share)

    def _sleep_until(self, share: float) -> None:
        """Let time pass until this share of the backward pass is over."""
        if share > self._passed:
            # Not until a time: what comes between, as a pause does, holds up the rest.
            self._comm.sleep((share - self._passed) * self._step_time.backward * self._factor)
            self._passed = share


def _by_elements(parameters: Sequence[Tensor]) -> list[float]:
    """When each gradient is final, if tensors take their time by their elements, the last one first."""
    sizes = [each.numel() for each in reversed(parameters)]
    return [done / sum(sizes) for done in accumulate(sizes)][::-1]


def check_simulated(settings: Settings, recipes: Sequence[str]) -> None:
    """Refuse what has no virtual time.

    Raises:
        ConfigError: with the setting or the recipe, and the fix.
    """
    for recipe in recipes:
        parse_strategy(recipe, "whose code cannot be simulated. Use AllReduce(), or compare without --simulate")
    if settings.elastic:
        raise ConfigError("elastic=True: simulated workers cannot be lost. Leave it out, or compare without --simulate")
