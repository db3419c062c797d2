# SPDX-License-Identifier: Apache-2.0
"""Which recipe suits a network: candidates are simulated with their own code, ranked, and one is recommended.

A recipe is better the less time it needs to the loss that AllReduce() reaches: the predicted time of a step, times how
many more steps it needed where that was measured (`candidates.measured`). One that needed fewer steps is counted as if
it needed as many: that it learns faster on small tasks promises nothing on a larger one. One that missed the loss in a
measured run has no such number, and is never recommended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, log, prod
from typing import Literal

import torch

from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy, check_workers
from thinwire.methods.strategies.recipe import parse
from thinwire.planning.plan.candidates import CANDIDATES, DENSE, Accuracy, AccuracyTable, measured
from thinwire.planning.plan.predict import MOST_WORKERS, ModelTime, Prediction, own_work, predict, slower, usable_device
from thinwire.planning.plan.timings import Timings, digest
from thinwire.planning.plan.traffic import MakeOptimizer
from thinwire.planning.simulate import Network
from thinwire.planning.units import digits, rate
from thinwire.registry import canonical

NEARLY = 1.05
"""Recipes that take up to this many times as long as the best are within noise of it; see `choose`."""
SLOWEST, FASTEST = 1e7, 1e11
"""Bits per second between which another choice is looked for."""
FEW_WORKERS = 8
"""As many are simulated each on its own where bytes need not be exact."""
_FEW_TENSORS = 6
_PRECISE = 1.05
_STRIDE = 10**0.5


@dataclass(frozen=True)
class Job:
    """A training job: the model, the workers and the network.

    Attributes:
        shapes: of the trained parameter tensors, in the model's order.
        workers: how many.
        network: rates and latencies.
        model_time: of the model's step on one worker without communication.
        dtype: of the parameters.
        optimizer: makes the optimizer; unless given, one that each strategy takes.
        sharing: how many times as long a strategy computes in training as alone, where workers share processors.
    """

    shapes: Sequence[tuple[int, ...]]
    workers: int
    network: Network
    model_time: ModelTime
    dtype: torch.dtype = torch.float32
    optimizer: MakeOptimizer | None = None
    sharing: float = 1.0

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(prod(shape) for shape in self.shapes)

    def coarse(self) -> Job:
        """The same in few tensors, which is simulated faster; for looking how a choice depends on the network."""
        if len(self.shapes) <= _FEW_TENSORS:
            return self
        edges = [place * self.elements // _FEW_TENSORS for place in range(_FEW_TENSORS + 1)]
        shapes = [(stop - start,) for start, stop in pairwise(edges)]
        return replace(self, shapes=shapes, model_time=replace(self.model_time, ready=()))


@dataclass(frozen=True)
class Option:
    """A recipe, and what it would cost.

    Attributes:
        recipe: as text.
        prediction: None where it cannot serve.
        accuracy: what was measured of it; None if nothing was.
        refused: why it cannot serve this number of workers, this optimizer or this model; "" if it can.
    """

    recipe: str
    prediction: Prediction | None
    accuracy: Accuracy | None
    refused: str = ""

    @property
    def seconds(self) -> float:
        """Of a step; infinite where it cannot serve."""
        return inf if self.prediction is None else self.prediction.seconds

    @property
    def steps(self) -> float:
        """Steps to AllReduce()'s loss, as a multiple of AllReduce()'s and at least 1.

        Infinite if nothing was measured, or if a measured run did not reach the loss.
        """
        return inf if self.accuracy is None else max(1.0, self.accuracy.factor)

    @property
    def to_loss(self) -> float:
        """Seconds to the loss that AllReduce() has after one step, so to speak: those of a step times `steps`."""
        return self.seconds * self.steps


@dataclass(frozen=True)
class Crossing:
    """Where another recipe would be chosen.

    Attributes:
        bits_per_second: of the usual link, at which the choice changes; those that differ keep their ratio to it.
        factor: the same rate over the usual link's own: how many times as fast all links would be.
        side: whether links that are faster, or slower, choose it.
        recipe: the one that would be chosen; never that of the recommended one.
    """

    bits_per_second: float
    factor: float
    side: Literal["faster", "slower"]
    recipe: str


@dataclass
class Planner:
    """Predicts recipes for a job, each once.

    Args:
        job: the job.
        recipes: those that are looked at, from the one that changes training least.
        table: of accuracy.
        timings: keeps the seconds that strategies compute themselves; in memory unless given.
        tell: called with each recipe before it is simulated.
        timed_elements: of the largest vector on which they are timed; more are extrapolated.
        most_workers: of more, one stands for all where all do the same, which takes much less time; see `predict`.
    """

    job: Job
    recipes: Sequence[str] = CANDIDATES
    table: AccuracyTable = field(default_factory=measured)
    tell: Callable[[str], None] = lambda _: None
    timed_elements: int = 1 << 21
    most_workers: int = MOST_WORKERS
    timings: Timings = field(default_factory=Timings)
    _coarse: dict[tuple[str, Network, int], Option] = field(default_factory=dict[tuple[str, Network, int], Option])

    def __post_init__(self) -> None:
        """Read every recipe, so that a mistake is named before any is simulated.

        Raises:
            ConfigError: a recipe cannot be read, none is given, or torch cannot use the network's device here.
        """
        if not self.recipes:
            raise ConfigError("no recipes to look at. Name some, such as LocalSGD(period=8)")
        for recipe in self.recipes:
            parse(recipe)
        usable_device(self.job.network.device)

    def options(self) -> list[Option]:
        """Return every recipe; those that cannot serve at the end, others from the least time to the loss."""
        return ranked(self._options(self.job))

    def at(self, recipe: str, network: Network, workers: int | None = None) -> Option:
        """Return one recipe on another network, or with another number of workers."""
        job = replace(self.job, network=network, workers=workers or self.job.workers).coarse()
        return self._remembered(recipe, job)

    def crossings(self, options: Sequence[Option]) -> list[Crossing]:
        """Find the nearest rates, slower and faster, at which another recipe than the recommended one is chosen.

        Tensors are taken as a few, which is faster and not quite exact. Predictions are scaled by what that changes at
        the job's own rate, so that the choice there is the recommended one.

        Args:
            options: what `options` has returned.

        Returns:
            Up to one for each side.
        """
        chosen = choose(options)
        exact = {each.recipe: each.seconds for each in options if each.to_loss < inf}
        rate, coarse = self.job.network.bits_per_second, self.job.coarse()
        scale = {
            recipe: seconds / self._remembered(recipe, coarse).seconds
            for recipe, seconds in exact.items()
            if coarse is not self.job
        }

        def choice(bits_per_second: float) -> str:
            network = slower(self.job.network, rate / bits_per_second)
            self.tell(f"at {words_of_rate(bits_per_second)}")
            return choose(list(self._options(replace(coarse, network=network), scale))).recipe

        found: list[Crossing] = []
        sides: tuple[tuple[Literal["faster", "slower"], float, float], ...] = (
            ("slower", 1 / _STRIDE, SLOWEST),
            ("faster", _STRIDE, FASTEST),
        )
        for side, stride, limit in sides:
            here = rate
            while (limit - here) * (stride - 1) > 0:
                # The last stride ends at the limit.
                there = min(limit, here * stride) if stride > 1 else max(limit, here * stride)
                if choice(there) != chosen.recipe:
                    found.append(self._bisect(here, there, choice, chosen.recipe, side))
                    break
                here = there
        return found

    def _bisect(
        self, here: float, there: float, choice: Callable[[float], str], chosen: str, side: Literal["faster", "slower"]
    ) -> Crossing:
        """Between a rate with the choice and one with another."""
        while abs(log(there / here)) > log(_PRECISE):
            middle = (here * there) ** 0.5
            here, there = (middle, there) if choice(middle) == chosen else (here, middle)
        # The choice has changed here for certain.
        return Crossing(there, there / self.job.network.bits_per_second, side, choice(there))

    def _options(self, job: Job, scale: Mapping[str, float] | None = None) -> Iterator[Option]:
        """Yield each recipe; on another network without those that cannot win there."""
        least = inf
        for recipe in self.recipes:
            if job is self.job:
                self.tell(recipe)
                yield self._predict(recipe, job)
                continue
            accuracy = self.table.of(recipe)
            bound = inf if accuracy is None else job.model_time.seconds * max(1.0, accuracy.factor)
            # It cannot win even if it never waits. AllReduce() is always there to be compared with.
            if (bound == inf or bound > least * NEARLY) and recipe != DENSE:
                continue
            option = self._remembered(recipe, job)
            if scale and option.prediction is not None and recipe in scale:
                seconds = option.prediction.seconds * scale[recipe]
                option = replace(option, prediction=replace(option.prediction, seconds=seconds))
            least = min(least, option.to_loss)
            yield option

    def _remembered(self, recipe: str, job: Job) -> Option:
        key = recipe, job.network, job.workers
        if key not in self._coarse:
            self._coarse[key] = self._predict(recipe, job)
        return self._coarse[key]

    def _predict(self, recipe: str, job: Job) -> Option:
        strategy = parse(recipe)
        accuracy = self.table.of(recipe)
        try:
            parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
            check_workers(strategy, job.workers, None if job.optimizer is None else job.optimizer([parameter]))
            found = predict(
                strategy,
                parameters=job.shapes,
                workers=job.workers,
                network=job.network,
                model_time=job.model_time,
                optimizer=job.optimizer,
                own_seconds=self._own_seconds(recipe, strategy),
                dtype=job.dtype,
                # How a choice depends on the network needs no exact bytes.
                most_workers=self.most_workers if job is self.job else FEW_WORKERS,
            )
        except ConfigError as refusal:
            return Option(recipe, None, accuracy, str(refusal))
        return Option(recipe, found, accuracy)

    def _own_seconds(self, recipe: str, strategy: Strategy) -> Sequence[float]:
        """Timed once, on a part of a large model."""
        job, most, device = self.job, self.timed_elements, self.job.network.device

        def measure() -> list[float]:
            return own_work(
                strategy,
                parameters=job.shapes,
                workers=job.workers,
                rounds=2,
                dtype=job.dtype,
                device=device,
                most_elements=most,
            )

        shapes = job.shapes if job.elements <= most else [(most,)]
        key = f"{recipe} {digest(shapes, job.elements, job.workers, str(job.dtype))}" + (device and f" on {device}")
        return [each * job.sharing for each in self.timings.get(key, measure)]


def words_of_rate(bits_per_second: float) -> str:
    """Three digits of a rate, with its unit."""
    return rate(float(digits(bits_per_second / 1e6)) * 1e6)


def ranked(options: Iterable[Option]) -> list[Option]:
    """From the least time to the loss; then those that missed it in a measured run; then those not measured.

    Those that missed it come by the share of their runs, and all by the time of a step. What cannot serve is last.
    """

    def order(each: Option) -> tuple[bool, float, bool, float, float]:
        missed = each.accuracy.missed / each.accuracy.runs if each.accuracy else 1.0
        return bool(each.refused), each.to_loss, each.accuracy is None, missed, each.seconds

    return sorted(options, key=order)


def within_noise(options: Iterable[Option]) -> list[Option]:
    """Return the options whose time to the loss is within 5 % of the least, simplest first.

    The simplest stands first in `CANDIDATES`, the list of recipes from those that change training least. Recipes that
    are not in the list come after those that are.
    """
    serving = [each for each in options if each.to_loss < inf]
    limit = NEARLY * min((each.to_loss for each in serving), default=inf)
    places = {canonical(parse(recipe)): place for place, recipe in enumerate(CANDIDATES)}

    def order(each: Option) -> int:
        return places.get(canonical(parse(each.recipe)), len(places))

    return sorted((each for each in serving if each.to_loss <= limit), key=order)


def choose(options: Sequence[Option]) -> Option:
    """The recommended one: of those within noise of the least time to the loss, the simplest (see `within_noise`).

    Only recipes that reached the loss in every measured run are recommended, and none that would be slower than
    AllReduce().

    Args:
        options: of which some can serve; any order.

    Raises:
        ConfigError: none can serve, with the first refusal; or none of them reached the loss in every measured run.
    """
    near = within_noise(options)
    if near:
        return near[0]
    serving = [each for each in options if not each.refused]
    if not serving:
        first = next(iter(options))
        raise ConfigError(f"none of the {len(options)} recipes can serve here; {first.recipe}: {first.refused}")
    known = [each for each in serving if each.accuracy is not None]
    if known:
        missed = "; ".join(f"{each.recipe}: {each.accuracy.words()}" for each in known if each.accuracy)
        raise ConfigError(
            f"no recipe is recommended, because none reached the loss in every measured run: {missed}. Include "
            f"{DENSE}, or measure them on your task with thinwire compare"
        )
    raise ConfigError(
        f"of {serving[0].recipe} and the others accuracy was not measured, so that none is recommended. Include "
        f"{DENSE}, or run python -m benchmarks.accuracy with them"
    )
