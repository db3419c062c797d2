# SPDX-License-Identifier: Apache-2.0
"""`thinwire plan`: which recipe suits a model, a network and a number of workers, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.console import err, out, print_json
from thinwire.cli.progress import Parts
from thinwire.cli.step_time import ModelOptions
from thinwire.errors import ConfigError
from thinwire.planning.units import digits, nbytes, rate, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thinwire.cli.step_time import TimedModel
    from thinwire.planning.doctor.findings import Examination
    from thinwire.planning.doctor.speeds import StepTime
    from thinwire.planning.plan import BucketOption
    from thinwire.planning.plan.decision import Decision
    from thinwire.planning.plan.search import Option
    from thinwire.planning.plan.timings import Timings
    from thinwire.planning.simulate import Network

_STEP_BUDGET = 4.0
_FORWARD = 1 / 3
_FEWEST, _MOST = 2, 4096
_BUSY = 0.5  # running processes a core
_NOT_PLANNED = {
    "compute": "the step takes what --step-seconds says, or what it takes here; workers may have a slowdown",
    "deaths": "a plan is for workers that live; thinwire simulate has deaths",
    "pauses": "a plan is for every step alike; thinwire simulate has pauses",
}


@dataclass(frozen=True, kw_only=True)
class Plan(ModelOptions):
    """Say which strategy suits your model, network and number of workers, why, and what would change that.

    Example: thinwire plan --task text --link 100mbit --workers 4

    The model's training step is timed here, unless --step-seconds says what it takes on your machines. Then candidates
    are simulated with their own code, and ranked by the time to the loss that AllReduce() reaches: the predicted time
    of a step, times how many more steps a recipe needed where that was measured (python -m benchmarks.accuracy). A
    recipe that missed that loss in a measured run is not recommended. What is timed here is kept for later plans.

    Args:
        batch_size: examples per worker and step of the task's model; the task's own unless given.
        link: the workers' links, [RANK:]RATE[+DELAY], separated by commas, such as 100mbit or 1gbit+5ms,0:100mbit.
        workers: how many train together; those of the doctor's file, or 4, unless given.
        slow: workers that compute slower, [RANK:]FACTORx, separated by commas, such as 3:5x. For workers of unequal
            speeds a quorum and a grace window of LateMerging are recommended too.
        network: instead of --link, a network file as of thinwire simulate.
        doctor: instead of --link, what thinwire doctor --out has written on your machines; with the step it timed
            unless a task or a model is given.
        bucket: instead of --link, a bucket over which the workers train, LATENCY,UP,DOWN, such as 40ms,20mbit,50mbit;
            recipes get the shortest period that keeps to --within.
        prices: with --bucket, dollars for 1,000 writes, for 1,000 reads, and for 1 GB that is read; those of S3 unless
            given, 0.005,0.0004,0.09.
        within: with --bucket, how many times as long a step may take as one without communication.
        published: instead of --link, a table of measurements with its models and links, NAME.toml and NAME.tsv: its
            numbers are fitted as the file says, and its cells predicted. With --link NAME, plan on that fitted link.
        cell: with --published, explain this cell: model, workers, link, method.
        step_seconds: what a training step takes without communication, instead of timing it here; a third is taken as
            the forward pass.
        optimizer: sgd or adamw, which is timed with the step, and which some strategies do not serve; unless given,
            the task's own, or adamw for --model.
        strategies: recipes separated by semicolons, instead of the candidates that the package has.
        measure_again: time the step and the recipes again, instead of taking figures that earlier plans kept.
        json: print everything as JSON.
    """

    batch_size: int | None = None
    link: str | None = None
    workers: int | None = None
    slow: str | None = None
    network: Path | None = None
    doctor: Path | None = None
    bucket: str | None = None
    prices: str | None = None
    within: float = 1.05
    published: Path | None = None
    cell: str | None = None
    step_seconds: float | None = None
    optimizer: str | None = None
    strategies: str | None = None
    measure_again: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Plan; returns 0.

        Raises:
            ConfigError: options that exclude each other, or a value that cannot be.
        """
        self._check()
        if self.bucket is not None:
            return self._over_bucket(self.bucket)
        if self.published is not None and self.link is None:
            return self._published(self.published)
        from thinwire.planning.doctor.host import load_average, usable_cores
        from thinwire.planning.plan.candidates import CANDIDATES
        from thinwire.planning.plan.decision import decide
        from thinwire.planning.plan.timings import Timings, timings_path

        seen = self._examination()
        if seen is not None and all(pair.problem for pair in seen.pairs):
            ranks = "one process alone" if seen.size == 1 else f"{seen.size} ranks, of which none reached another"
            raise ConfigError(f"--doctor {self.doctor}: has no link, as it is of {ranks}. Give --link, or examine more")
        workers = self.workers if self.workers is not None else (seen.size if seen else 4)
        if not _FEWEST <= workers <= _MOST:
            raise ConfigError(f"--workers {workers}: must be {_FEWEST} to {_MOST}")
        network = self._slowed(self._network(seen, workers), workers)
        network.check(workers)
        recipes = CANDIDATES if self.strategies is None else _recipes(self.strategies)
        load, cores = load_average(), usable_cores()
        busy = load > _BUSY * cores
        timings = Timings(timings_path(), again=self.measure_again, busy=busy)
        examined = seen is not None and bool(seen.steps) and self.task is None and self.own_model is None
        meta = examined or self.step_seconds is not None
        made = self.made(optimizer=self.optimizer, batch_size=self.batch_size, meta=meta)
        with Parts(f"planning: {len(recipes)} recipes are simulated, which may take minutes") as tell:
            step = self._step(made, seen if examined else None, timings, tell)
            job = step.job(workers, network, made.optimizer, sharing=1.0 if seen is None else seen.sharing)
            found = decide(job, recipes, timings=timings, tell=tell, expect=tell.expect)
        if busy and timings.measured:
            err.print(
                f"this machine was busy in the last minute: a load of {load:.1f} on {cores} cores. If other programs "
                "still run, what was measured now seems to take longer than in training: stop them and plan again"
            )
        if self.json:
            print_json({**found.as_json(), "step": step})
        else:
            _print(found, step, counted=self.link is None)
        return 0

    def _published(self, path: Path) -> int:
        """Predict the cells of a source, or explain one."""
        from thinwire.planning.plan.published import explain_cell, load_source

        source = load_source(path)
        with Parts("planning: the cells are predicted, which may take minutes"):
            explained = "" if self.cell is None else explain_cell(source, self.cell)
            found = [] if explained else source.predict()
        if self.json:
            print_json({"cells": [asdict(each) | {"error": each.error} for each in found]})
        else:
            out.print(explained or "\n".join(each.words() for each in found))
        return 0

    def _over_bucket(self, text: str) -> int:
        """Plan for a bucket, by the objects that `thinwire explain --bucket` counts."""
        from math import prod

        from thinwire.planning.plan import parse_store, plan_bucket
        from thinwire.planning.plan.over_bucket import BUCKET_CANDIDATES
        from thinwire.planning.plan.timings import Timings, timings_path

        store, workers = parse_store(text, self.prices), self.workers or 4
        if not _FEWEST <= workers <= _MOST:
            raise ConfigError(f"--workers {workers}: must be {_FEWEST} to {_MOST}")
        recipes = BUCKET_CANDIDATES if self.strategies is None else _recipes(self.strategies)
        meta = self.step_seconds is not None
        made = self.made(optimizer=self.optimizer, batch_size=self.batch_size, meta=meta)
        with Parts(f"planning: the objects of {len(recipes)} recipes are counted") as tell:
            step = self._step(made, None, Timings(timings_path(), again=self.measure_again), tell)
            options = plan_bucket(
                store,
                parameters=[prod(shape) for shape in step.shapes],
                workers=workers,
                step_seconds=step.seconds,
                within=self.within,
                recipes=recipes,
                optimizer=made.optimizer,
            )
        if options[0].refused:
            raise ConfigError(f"none of the {len(options)} recipes can be used over this bucket: {options[0].refused}")
        if self.json:
            found = {"workers": workers, "store": asdict(store), "step_seconds": step.seconds, "within": self.within}
            found |= {"recommended": options[0].recipe, "options": [each.as_json() for each in options]}
            print_json(found)
        else:
            _print_over_bucket(step, workers, options, self.within)
        return 0

    def _check(self) -> None:
        """Refuse options that exclude each other.

        Raises:
            ConfigError: with the two.
        """
        given = [name for name in ("link", "network", "doctor", "bucket") if getattr(self, name) is not None]
        if self.cell is not None and (self.published is None or given or self.json):
            raise ConfigError(f"--cell {self.cell}: goes with --published alone, and is printed as text")
        if self.published is not None:
            self._check_published()
            given = ["published"]
        if len(given) != 1:
            words = f"--{given[0]} and --{given[1]}: give one of them" if given else "no network: give --link 100mbit"
            raise ConfigError(f"{words}. A network is --link, --network FILE, --doctor FILE or --bucket")
        if self.bucket is None and (self.prices is not None or self.within != Plan.within):
            raise ConfigError("--prices and --within are for --bucket. Add that, or leave them out")
        if self.doctor is not None and self.task is None and self.own_model is None:
            for name, value in (("model-size", self.model_size), ("batch-size", self.batch_size), ("data", self.data)):
                if value is not None:
                    both = f"--{name} {value} with --doctor {self.doctor}"
                    raise ConfigError(f"{both}: its step was timed already. Give --task too, to time that task's model")
        if self.step_seconds is not None and not 0 < self.step_seconds < 1e6:
            raise ConfigError(f"--step-seconds {self.step_seconds}: must be positive seconds, such as 0.25")
        if self.optimizer not in (None, "sgd", "adamw"):
            raise ConfigError(f"--optimizer {self.optimizer}: must be sgd or adamw")

    def _check_published(self) -> None:
        """Refuse options that predictions of a table, or links of its file, do not use."""
        others = ("network", "doctor", "bucket")
        for name in others if self.link is not None else [each.name for each in fields(self)]:
            value = getattr(self, name)
            if name not in ("published", "cell", "json") and value != getattr(Plan, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value} with --published {self.published}: its cells and links are in "
                    "its own files. Leave it out, or add --link NAME to plan on one of its links"
                )

    def _examination(self) -> Examination | None:
        from thinwire.planning.doctor.examination import read_examination

        return None if self.doctor is None else read_examination(self.doctor)

    def _network(self, seen: Examination | None, workers: int) -> Network:
        from thinwire.lab.emulate import parse_links
        from thinwire.planning.plan.networks import check_entries, network_of_links
        from thinwire.planning.simulate import load_network

        if self.published is not None and self.link is not None:
            from thinwire.planning.plan.published import load_source

            network = load_source(self.published).calibrated().network(self.link)
            check_entries(network, f"--published {self.published}: {self.link}", _NOT_PLANNED)
            return network
        if self.network is not None:
            network = load_network(self.network, name=f"--network {self.network}")
            check_entries(network, f"--network {self.network}", _NOT_PLANNED)
            return network
        if seen is not None:
            from thinwire.planning.doctor.verdict import network_of

            found = network_of(seen)
            if workers == seen.size:
                return found
            from thinwire.planning.plan.network_words import differences

            if different := differences(found):
                err.print(
                    f"--workers {workers}: the doctor examined {seen.size}, of which {different}; which of {workers} "
                    "that holds of is not known, so their links are taken to be alike"
                )
            return replace(found, specials=(), pairs=())
        return network_of_links(parse_links(self.link or "none", workers))

    def _slowed(self, network: Network, workers: int) -> Network:
        """Add the workers of --slow.

        Raises:
            ConfigError: the option cannot be read.
        """
        from thinwire.lab.emulate import parse_stragglers
        from thinwire.planning.simulate import Special

        slow = parse_stragglers(self.slow, None, workers=workers)
        specials = [Special((each.rank,), slowdown=each.factor) for each in slow if each.factor != 1]
        return replace(network, specials=(*network.specials, *specials)) if specials else network

    def _step(
        self, made: TimedModel, seen: Examination | None, timings: Timings, tell: Callable[[str], None]
    ) -> StepTime:
        """Of the model: as the doctor has timed it, from --step-seconds, or timed here."""
        if seen is not None:
            step = max(seen.steps.values(), key=lambda each: each.seconds)
        elif self.step_seconds is not None:
            step = made.shapes()
        else:
            tell("the model's training step, here")
            step = self._timed(made, timings)
        if self.step_seconds is not None:
            forward = _FORWARD * self.step_seconds
            step = replace(step, forward=forward, backward=self.step_seconds - forward, update=0.0, ready=[])
        return step

    def _timed(self, model: TimedModel, timings: Timings) -> StepTime:
        """Return the step, timed here; of a task's model once, as only the user knows when their own model changes."""
        from thinwire.planning.doctor.speeds import StepTime
        from thinwire.planning.plan.timings import digest

        if self.own_model is not None:
            return model.timed(_STEP_BUDGET)
        shapes, data = model.shapes().shapes, self.data and self.data.absolute()
        name = f"a step of {model.name} {digest(shapes, self.optimizer, data)}"
        return StepTime(**timings.get(name, lambda: asdict(model.timed(_STEP_BUDGET))))


def _recipes(text: str) -> list[str]:
    """Return the recipes in a text; torch's own methods cannot be simulated.

    Raises:
        ConfigError: with the recipe.
    """
    from thinwire.lab.runs.recipes import parse_strategy, split_recipes

    split_recipes(text)
    # As they were written: a table that says LocalSGD() where one has asked for LocalSGD(period=8) is not plain.
    found = [part.strip() for part in text.split(";") if part.strip()]
    for recipe in found:
        parse_strategy(recipe, "whose code cannot be simulated. AllReduce() does what ddp does")
    return found


# -- results -----------------------------------------------------------------------------------------------------------


def _print_over_bucket(step: StepTime, workers: int, options: list[BucketOption], within: float) -> None:
    _print_step(step, f"{workers} workers over a bucket")
    chosen = options[0]
    rows = [
        (
            each.recipe,
            f"{each.slowdown:.3f}x",
            nbytes(each.cost.up_bytes_per_step),
            nbytes(each.cost.down_bytes_per_step),
            f"${each.cost.dollars_per_day:.2f}",
            "not measured" if each.accuracy is None else each.accuracy.words(),
        )
        for each in options
        if each.cost is not None
    ]
    _print_rows(("strategy", "step", "up", "down", "a day", "steps to the loss"), rows, chosen.recipe, options)
    assert chosen.cost is not None, "what is chosen can serve"
    out.print(f"\n{chosen.recipe}", style="bold")
    reason = "of the recipes whose accuracy was measured it needs the least time to the loss of AllReduce()"
    if not isfinite(chosen.to_loss):
        reason = (
            "no recipe whose accuracy was measured keeps to that, and this one has the shortest period. A longer "
            "period may need more steps: thinwire compare measures that on your task"
        )
    out.print(
        f"Its period keeps a step within {within:g} times of one without communication; {reason}. This run makes "
        f"{chosen.cost.requests_per_day:,.0f} requests and reads {nbytes(chosen.cost.bytes_per_day)} a day, for "
        f"${chosen.cost.dollars_per_day:.2f}; waiting adds reads."
    )


def _print_step(step: StepTime, where: str) -> None:
    out.print(
        f"{step.name}: {step.parameters / 1e6:.3g} M parameters, a step takes {seconds(step.seconds)} without "
        f"communication; {where}\n"
    )


def _print_rows(
    heads: tuple[str, ...], rows: list[tuple[str, ...]], chosen: str, options: Sequence[Option | BucketOption]
) -> None:
    """Print a table whose first column is a name and whose last is text, then the options that were refused."""
    width = max(len(name) for name, *_ in rows) + 2
    for name, *figures, last in (heads, *rows):
        style = "dim" if name == heads[0] else "bold" if name == chosen else None
        out.print(f"{name:<{width}}{''.join(f'{each:>10}' for each in figures)}  {last}", style=style)
    for each in options:
        if each.refused:
            out.print(f"left out: {each.recipe}: {each.refused}")


def _print(found: Decision, step: StepTime, *, counted: bool) -> None:
    from thinwire.planning.plan.network_words import differences

    planner, job, chosen = found.planner, found.planner.job, found.chosen
    others = differences(job.network)
    lost = digits(100 * job.network.contention)
    links = f"{rate(job.network.bits_per_second)}, {seconds(job.network.latency)} one way" + f"; {others}" * bool(
        others
    )
    links += f"; {lost} % of computation is lost while messages pass" * bool(job.network.contention)
    _print_step(step, f"{job.workers} workers, {links}")
    rows = [
        (
            each.recipe,
            seconds(each.prediction.seconds),
            seconds(each.prediction.exposed),
            f"{each.prediction.efficiency:.2f}",
            nbytes(each.prediction.payload_bytes),
            nbytes(each.prediction.memory_bytes),
            digits(each.to_loss / chosen.to_loss) if isfinite(each.to_loss) else "-",
            "not measured" if each.accuracy is None else each.accuracy.words(),
        )
        for each in found.options
        if each.prediction is not None
    ]
    heads = ("strategy", "step", "waits", "linear", "sent", "memory", "time", "steps to the loss")
    _print_rows(heads, rows, chosen.recipe, found.options)
    out.print(f"\n{chosen.recipe}", style="bold")
    out.print(found.why)
    if chosen.accuracy is not None and any(each != 1 for each in chosen.accuracy.rates.values()):
        rates = " and ".join(f"{each:g} on {task}" for task, each in chosen.accuracy.rates.items())
        out.print(f"It did best with other learning rates than AllReduce(), times as high: {rates}.")
    out.print(found.changes)
    out.print(
        f"Steps to the loss of AllReduce(), {planner.table.provenance} ({planner.table.command}); "
        "on your task thinwire compare measures them. Time is that to the loss, of the recommended one 1."
    )
    if found.timings:
        out.print(found.timings)
    if not counted:
        out.print(
            "What messages take from the processors that compute is not counted: thinwire doctor measures it on your "
            "machines, and --doctor FILE counts it."
        )
    if found.late is not None:
        out.print(
            f"\nWorkers have unequal speeds. With elastic=LateMerging(quorum={found.late['quorum']:g}, "
            f"deviations={found.late['deviations']:g}) and a strategy of local rounds, such as DiLoCo, "
            f"{found.late['goodput']:.0%} of their summed speed is used; rounds that wait for all workers use "
            f"{found.late['goodput_of_waiting']:.0%}. Predicted, without transfers"
        )
