# SPDX-License-Identifier: Apache-2.0
"""`thinwire plan`: which recipe suits a model, a network and a number of workers, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import datetime
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.console import err, out, print_json
from thinwire.cli.network_words import differences, rates_differ
from thinwire.cli.progress import Parts
from thinwire.core.storage.files import check_writable
from thinwire.core.units import digits, nbytes, rate, seconds
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from thinwire.cli.step_time import TimedModel
    from thinwire.planning.doctor.findings import Examination
    from thinwire.planning.doctor.speeds import StepTime
    from thinwire.planning.plan import BucketOption
    from thinwire.planning.plan.candidates import Accuracy
    from thinwire.planning.plan.meshes import LanguageModel
    from thinwire.planning.plan.search import Crossing, Job, Option, Planner
    from thinwire.planning.plan.timings import Timings
    from thinwire.planning.plan.traffic import MakeOptimizer
    from thinwire.planning.simulate import Network, Pair, Racks, Special

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
class Plan:
    """Say which strategy suits your model, network and number of workers, why, and what would change that.

    Example: thinwire plan --task text --link 100mbit --workers 4

    The model's training step is timed here, unless --step-seconds says what it takes on your machines. Then candidates
    are simulated with their own code, and ranked by the time to the loss that AllReduce() reaches: the predicted time
    of a step, times how many more steps a recipe needed where that was measured (python -m benchmarks.accuracy). A
    recipe that missed that loss in a measured run is not recommended. What is timed here is kept for later plans.

    Args:
        task: whose model is planned for.
        model_size: a named size of the task's model.
        own_model: instead of a task, module:function of yours; it returns a model, a function without arguments that
            computes the loss of a batch, and, if you like, your optimizer.
        batch_size: examples per worker and step of the task's model; the task's own unless given.
        data: the folder of data files; that of the environment variable THINWIRE_DATA unless given.
        link: the workers' links, [RANK:]RATE[+DELAY], separated by commas, such as 100mbit or 1gbit+5ms,0:100mbit.
        latency: one way between two workers, such as 10ms, besides the links' delays; 0.1ms unless given.
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
        step_seconds: what a training step takes without communication, instead of timing it here; a third is taken as
            the forward pass.
        optimizer: sgd or adamw, which is timed with the step, and which some strategies do not serve; unless given,
            the task's own, or for --model the one that your function returns, or adamw.
        strategies: recipes separated by semicolons, instead of the candidates that the package has.
        plot: a picture of step times by link rate, latency and number of workers, as .png, .svg or .pdf.
        plot_workers: the most workers in the picture, up to 4096.
        measure_again: time the step and the recipes again, instead of taking figures that earlier plans kept.
        json: print everything as JSON.
    """

    task: str | None = None
    model_size: str | None = None
    own_model: str | None = None
    batch_size: int | None = None
    data: Path | None = None
    link: str | None = None
    latency: str | None = None
    workers: int | None = None
    slow: str | None = None
    network: Path | None = None
    doctor: Path | None = None
    bucket: str | None = None
    prices: str | None = None
    within: float = 1.05
    step_seconds: float | None = None
    optimizer: str | None = None
    strategies: str | None = None
    plot: Path | None = None
    plot_workers: int = 64
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
        from thinwire.planning.doctor.host import load_average, usable_cores
        from thinwire.planning.plan.candidates import CANDIDATES
        from thinwire.planning.plan.search import Planner, choose
        from thinwire.planning.plan.timings import Timings, timings_path

        seen = self._examination()
        if seen is not None and all(pair.problem for pair in seen.pairs):
            ranks = "one process alone" if seen.size == 1 else f"{seen.size} ranks, of which none reached another"
            raise ConfigError(
                f"--doctor {self.doctor}: has no link, as it is of {ranks}. Start the doctor on all machines or with "
                "--workers, or give --link"
            )
        workers = self.workers if self.workers is not None else (seen.size if seen else 4)
        if not _FEWEST <= workers <= _MOST:
            raise ConfigError(f"--workers {workers}: a plan is for {_FEWEST} to {_MOST} workers")
        network = self._slowed(self._network(seen, workers), workers)
        network.check(workers)
        recipes = CANDIDATES if self.strategies is None else _recipes(self.strategies)
        load, cores = load_average(), usable_cores()
        busy = load > _BUSY * cores
        timings = Timings(timings_path(), again=self.measure_again, busy=busy)
        examined = seen is not None and bool(seen.steps) and self.task is None and self.own_model is None
        made = self._made(meta=examined or self.step_seconds is not None)
        with Parts(f"planning: {len(recipes)} recipes are simulated, which may take minutes") as tell:
            step = self._step(made, seen if examined else None, timings, tell)
            model = None if self.strategies is not None or self.own_model is not None else self._language_model(seen)
            job = _job(step, workers, network, made.optimizer, sharing=1.0 if seen is None else seen.sharing)
            planner = Planner(job, recipes, tell=tell, model=model, timings=timings)
            tell.expect(len(recipes) + len(planner.meshes()))
            options = planner.options()
            chosen = choose(options)
            tell.expect(None)
            tell("what would change the choice")
            crossings = planner.crossings(options)
            if self.plot is not None:
                tell("the picture")
                _draw(self.plot, planner, options, chosen, self.plot_workers)
        if busy and timings.measured:
            err.print(
                f"this machine was busy in the last minute: a load of {load:.1f} on {cores} cores. If other programs "
                "still run, what was measured now seems to take longer than in training: stop them and plan again",
                markup=False,
            )
        late = _late(network, workers)
        if self.json:
            print_json({**as_json(planner, step, options, chosen, crossings), "late": late})
            return 0
        _print(planner, step, options, chosen, crossings, counted=self.link is None)
        if late is not None:
            out.print(
                f"\nWorkers have unequal speeds. With elastic=LateMerging(quorum={late['quorum']:g}, "
                f"deviations={late['deviations']:g}) and a strategy of local rounds, such as DiLoCo, "
                f"{late['goodput']:.0%} of their summed speed is used; rounds that wait for all workers use "
                f"{late['goodput_of_waiting']:.0%}. Predicted, without transfers",
                markup=False,
            )
        return 0

    def _over_bucket(self, text: str) -> int:
        """Plan for a bucket, by the objects that `thinwire explain --bucket` counts."""
        from math import prod

        from thinwire.planning.plan import parse_store, plan_bucket
        from thinwire.planning.plan.over_bucket import BUCKET_CANDIDATES
        from thinwire.planning.plan.timings import Timings, timings_path

        store, workers = parse_store(text, self.prices), self.workers or 4
        if not _FEWEST <= workers <= _MOST:
            raise ConfigError(f"--workers {workers}: a plan is for {_FEWEST} to {_MOST} workers")
        recipes = BUCKET_CANDIDATES if self.strategies is None else _recipes(self.strategies)
        made = self._made(meta=self.step_seconds is not None)
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
            found |= {"recommended": options[0].recipe, "options": [_bucket_fields(each) for each in options]}
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
        if len(given) != 1:
            words = f"--{given[0]} and --{given[1]}: give one of them" if given else "no network: give --link 100mbit"
            raise ConfigError(f"{words}. A network is --link, --network FILE, --doctor FILE or --bucket")
        if self.bucket is None and (self.prices is not None or self.within != Plan.within):
            raise ConfigError("--prices and --within are for --bucket. Add that, or leave them out")
        if self.bucket is not None and self.plot is not None:
            raise ConfigError(f"--plot {self.plot} with --bucket: pictures are of links. Leave it out")
        if self.own_model is not None and (self.task is not None or self.model_size is not None):
            raise ConfigError(f"--model {self.own_model}: instead of --task and --model-size. Give one of them")
        if self.own_model is not None and self.batch_size is not None:
            raise ConfigError(f"--batch-size {self.batch_size} with --model: your function makes the batches")
        if self.doctor is not None and self.task is None and self.own_model is None:
            for name, value in (("model-size", self.model_size), ("batch-size", self.batch_size), ("data", self.data)):
                if value is not None:
                    raise ConfigError(
                        f"--{name} {value} with --doctor {self.doctor}: its step was timed already. Give --task too, "
                        "and that task's model is timed here"
                    )
        if self.latency is not None and self.link is None:
            raise ConfigError(
                f"--latency {self.latency}: goes with --link. A network file and the doctor have their own"
            )
        if self.step_seconds is not None and not 0 < self.step_seconds < 1e6:
            raise ConfigError(f"--step-seconds {self.step_seconds}: must be positive seconds, such as 0.25")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: must be at least 1")
        if self.optimizer not in (None, "sgd", "adamw"):
            raise ConfigError(f"--optimizer {self.optimizer}: must be sgd or adamw")
        if not _FEWEST <= self.plot_workers <= _MOST:
            raise ConfigError(f"--plot-workers {self.plot_workers}: must be {_FEWEST} to {_MOST}")
        if self.plot is not None:
            _check_plot(self.plot)

    def _examination(self) -> Examination | None:
        from thinwire.planning.doctor.reading import read_examination

        return None if self.doctor is None else read_examination(self.doctor)

    def _network(self, seen: Examination | None, workers: int) -> Network:
        from thinwire.core.quantities import parse_duration
        from thinwire.lab.emulate import parse_links
        from thinwire.planning.plan.networks import LATENCY, check_entries, network_of_links
        from thinwire.planning.simulate import load_network

        if self.network is not None:
            network = load_network(self.network, name=f"--network {self.network}")
            check_entries(network, f"--network {self.network}", _NOT_PLANNED)
            return network
        if seen is not None:
            from thinwire.planning.doctor.verdict import network_of

            found = network_of(seen)
            if workers == seen.size:
                return found
            if different := differences(found):
                err.print(
                    f"--workers {workers}: the doctor examined {seen.size}, of which {different}; which of {workers} "
                    "that holds of is not known, so their links are taken to be alike",
                    markup=False,
                )
            return replace(found, specials=(), pairs=())
        latency = (
            LATENCY if self.latency is None else parse_duration(self.latency, argument=f"--latency {self.latency}")
        )
        return network_of_links(parse_links(self.link or "none", workers), latency=latency)

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

    def _language_model(self, seen: Examination | None) -> LanguageModel | None:
        """What could be split over a mesh; None where the doctor has timed a model that is not known here."""
        from thinwire.cli.step_time import language_model

        if seen is not None and seen.steps and self.task is None:
            return None
        return language_model(self.task or "text", self.model_size, batch_size=self.batch_size, data=self.data)

    def _made(self, *, meta: bool) -> TimedModel:
        """The model, with the optimizer of the run; a mistake is named before anything is simulated."""
        from thinwire.cli.step_time import model_of

        return model_of(
            task=self.task or "text",
            model_size=self.model_size,
            model=self.own_model,
            batch_size=self.batch_size,
            data=self.data,
            optimizer=self.optimizer,
            meta=meta,
        )

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
        """The step, timed here; of a task's model once, as only the user knows when their own model changes."""
        from thinwire.planning.doctor.speeds import StepTime
        from thinwire.planning.plan.timings import digest

        if self.own_model is not None:
            return model.timed(_STEP_BUDGET)
        shapes, data = model.shapes().shapes, self.data and self.data.absolute()
        name = f"a step of {model.name} {digest(shapes, self.optimizer, data)}"
        return StepTime(**timings.get(name, lambda: asdict(model.timed(_STEP_BUDGET))))


def _recipes(text: str) -> list[str]:
    """The recipes in a text; torch's own methods cannot be simulated.

    Raises:
        ConfigError: with the recipe.
    """
    from thinwire.lab.runs.recipes import parse_recipe, split_recipes
    from thinwire.methods.strategies.base import Strategy

    split_recipes(text)
    # As they were written: a table that says LocalSGD() where one has asked for LocalSGD(period=8) is not plain.
    found = [part.strip() for part in text.split(";") if part.strip()]
    for recipe in found:
        if not isinstance(parse_recipe(recipe), Strategy):
            raise ConfigError(f"{recipe}: is torch's own method, whose code cannot be simulated; AllReduce() is ddp's")
    return found


def _job(step: StepTime, workers: int, network: Network, optimizer: MakeOptimizer, *, sharing: float) -> Job:
    import torch

    from thinwire.planning.plan.predict import ModelTime
    from thinwire.planning.plan.search import Job

    time = ModelTime(step.forward, step.backward, step.update, tuple(step.ready))
    shapes = [tuple(shape) for shape in step.shapes]
    return Job(shapes, workers, network, time, getattr(torch, step.dtype), optimizer, sharing)


def _check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before a plan takes minutes.

    Raises:
        ConfigError: its suffix, a missing package, or a place that cannot be written to.
    """
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: must end in .png, .svg or .pdf")
    try:
        import thinwire.lab.report.crossover  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as missing:
        raise ConfigError(f"--plot needs {missing.name} for its drawing; pip install 'thinwire[report]'") from None
    try:
        check_writable(path)
    except OSError as error:
        raise ConfigError(
            f"--plot {path}: cannot be written ({error.strerror}). Name a file in a folder you may write to"
        ) from None


# -- results -----------------------------------------------------------------------------------------------------------


def _draw(path: Path, planner: Planner, options: list[Option], chosen: Option, most: int) -> None:
    from thinwire.lab.report.crossover import Sweep, draw_crossovers
    from thinwire.planning.plan.sweeps import LATENCIES, RATES, by_latency, by_rate, by_workers, recipes_to_draw

    job = planner.job
    recipes = recipes_to_draw(options, chosen.recipe)
    counts, rows = by_workers(planner, recipes, most)
    sweeps = [
        Sweep("link", "rate", RATES, by_rate(planner, recipes), job.network.bits_per_second),
        Sweep("latency", "seconds", LATENCIES, by_latency(planner, recipes), job.network.latency),
        Sweep("workers", "count", counts, rows, job.workers),
    ]
    usual = rate(job.network.bits_per_second) + ", other links in proportion" * rates_differ(job.network)
    title = f"predicted; {job.elements / 1e6:.3g} M parameters, {job.workers} workers, {usual}"
    draw_crossovers(path, sweeps, title)
    err.print(str(path), markup=False)


def _late(network: Network, workers: int) -> dict[str, float] | None:
    """Recommend when rounds of unequal workers close; None if all have one speed."""
    from thinwire.planning.plan.late import recommend

    slowdowns = [1.0] * workers
    for special in network.specials:
        for rank in special.ranks:
            slowdowns[rank] *= special.slowdown
    if len(set(slowdowns)) == 1:
        return None
    (quorum, deviations), late, waiting = recommend([each / min(slowdowns) for each in slowdowns])
    return {
        "quorum": quorum,
        "deviations": deviations,
        "goodput": late.goodput,
        "goodput_of_waiting": waiting.goodput,
    }


def as_json(
    planner: Planner, step: StepTime, options: list[Option], chosen: Option, crossings: list[Crossing]
) -> dict[str, Any]:
    """Return everything that a plan found, as JSON can have it: None stands for infinity and for what is not known."""
    from thinwire.planning.plan.search import within_noise

    network = planner.job.network
    return {
        "workers": planner.job.workers,
        "bits_per_second": network.bits_per_second,
        "latency": network.latency,
        "contention": network.contention,
        "racks": network.racks and _finite(network.racks),
        "workers_that_differ": [_finite(each) for each in network.specials],
        "links_that_differ": [_finite(each) for each in network.pairs],
        "step": asdict(step),
        "recommended": chosen.recipe,
        "tensor_parallel": chosen.mesh and str(chosen.mesh),
        "why": why(options, chosen),
        "within_noise": [each.name for each in within_noise(options) if each is not chosen],
        "crossings": [asdict(each) for each in crossings],
        "timings": _timings_as_json(planner.timings),
        "accuracy": {"provenance": planner.table.provenance, "command": planner.table.command},
        "options": [_fields(each) for each in options],
    }


def _bucket_fields(option: BucketOption) -> dict[str, Any]:
    return {
        "recipe": option.recipe,
        "refused": option.refused,
        "slowdown": option.slowdown if isfinite(option.slowdown) else None,
        "relative_steps": option.accuracy and _finite(option.accuracy),
        "cost": option.cost and asdict(option.cost),
    }


def _print_over_bucket(step: StepTime, workers: int, options: list[BucketOption], within: float) -> None:
    out.print(
        f"{step.name}: {step.parameters / 1e6:.3g} M parameters, a step takes {seconds(step.seconds)} without "
        f"communication; {workers} workers over a bucket\n",
        markup=False,
    )
    width = max(len(each.recipe) for each in options) + 2
    out.print(_row("strategy", width, ("step", "up", "down", "a day", "steps to the loss")), style="dim", markup=False)
    chosen = options[0]
    for each in options:
        if each.cost is None:
            continue
        cost = each.cost
        figures = (
            f"{each.slowdown:.3f}x",
            nbytes(cost.up_bytes_per_step),
            nbytes(cost.down_bytes_per_step),
            f"${cost.dollars_per_day:.2f}",
            "not measured" if each.accuracy is None else each.accuracy.words(),
        )
        out.print(_row(each.recipe, width, figures), style="bold" if each is chosen else None, markup=False)
    for each in options:
        if each.refused:
            out.print(f"left out: {each.recipe}: {each.refused}", markup=False)
    assert chosen.cost is not None, "what is chosen can serve"
    out.print(f"\n{chosen.recipe}", style="bold", markup=False)
    reason = "of the recipes whose accuracy was measured it needs the least time to the loss of AllReduce()"
    if not isfinite(chosen.to_loss):
        reason = (
            "no recipe whose accuracy was measured keeps to that, and this one has the shortest period. A longer "
            "period may need more steps: thinwire compare measures that on your task"
        )
    out.print(
        f"Its period keeps a step within {within:g} times of one without communication; {reason}. This run makes "
        f"{chosen.cost.requests_per_day:,.0f} requests and reads {nbytes(chosen.cost.bytes_per_day)} a day, for "
        f"${chosen.cost.dollars_per_day:.2f}; waiting adds reads.",
        markup=False,
    )


def _timings_as_json(timings: Timings) -> dict[str, Any]:
    oldest = None if timings.oldest is None else datetime.fromtimestamp(timings.oldest).astimezone()
    return {
        "file": timings.path and str(timings.path),
        "kept": timings.kept,
        "measured": timings.measured,
        "oldest": oldest and oldest.isoformat(timespec="seconds"),
    }


def _finite(part: Racks | Special | Pair | Accuracy) -> dict[str, Any]:
    """A part of a plan for JSON, in which no number is infinite: None is no limit, or never."""
    return {name: None if value == inf else value for name, value in asdict(part).items()}


def _fields(option: Option) -> dict[str, Any]:
    found, accuracy = option.prediction, option.accuracy
    return {
        "recipe": option.recipe,
        "tensor_parallel": option.mesh and str(option.mesh),
        "refused": option.refused,
        "seconds_per_step": found and found.seconds,
        "efficiency": found and found.efficiency,
        "exposed_seconds_per_step": found and found.exposed,
        "own_seconds_per_step": found and found.own_seconds,
        "payload_bytes_per_step": found and found.payload_bytes,
        "busiest_payload_bytes_per_step": found and found.busiest_bytes,
        "memory_bytes": found and found.memory_bytes,
        "relative_steps": accuracy and _finite(accuracy),
        "relative_seconds_to_loss": option.to_loss if isfinite(option.to_loss) else None,
    }


def _print(
    planner: Planner,
    step: StepTime,
    options: list[Option],
    chosen: Option,
    crossings: list[Crossing],
    *,
    counted: bool,
) -> None:
    job = planner.job
    others = differences(job.network)
    lost = digits(100 * job.network.contention)
    links = f"{rate(job.network.bits_per_second)}, {seconds(job.network.latency)} one way" + f"; {others}" * bool(
        others
    )
    links += f"; {lost} % of computation is lost while messages pass" * bool(job.network.contention)
    out.print(
        f"{step.name}: {step.parameters / 1e6:.3g} M parameters, a step takes {seconds(step.seconds)} without "
        f"communication; {job.workers} workers, {links}\n",
        markup=False,
    )
    width = max(len(each.name) for each in options) + 2
    heads = ("step", "waits", "linear", "sent", "memory", "time", "steps to the loss")
    out.print(_row("strategy", width, heads), style="dim", markup=False)
    for each in options:
        found = each.prediction
        if found is None:
            continue
        figures = (
            seconds(found.seconds),
            seconds(found.exposed),
            f"{found.efficiency:.2f}",
            nbytes(found.payload_bytes),
            nbytes(found.memory_bytes),
            digits(each.to_loss / chosen.to_loss) if isfinite(each.to_loss) else "-",
            "not measured" if each.accuracy is None else each.accuracy.words(),
        )
        out.print(_row(each.name, width, figures), style="bold" if each is chosen else None, markup=False)
    for each in options:
        if each.refused:
            out.print(f"left out: {each.recipe}: {each.refused}", markup=False)
    split = ""
    if chosen.mesh is not None and planner.model is not None:
        samples = planner.model.samples * chosen.mesh.rows * chosen.mesh.columns
        split = f" with --tensor-parallel {chosen.mesh} --batch-size {samples}"
    out.print(f"\n{chosen.recipe}{split}", style="bold", markup=False)
    out.print(why(options, chosen), markup=False)
    if chosen.accuracy is not None and any(each != 1 for each in chosen.accuracy.rates.values()):
        rates = " and ".join(f"{each:g} on {task}" for task, each in chosen.accuracy.rates.items())
        out.print(f"It did best with other learning rates than AllReduce(), times as high: {rates}.", markup=False)
    out.print(_changes(crossings, job.network), markup=False)
    out.print(
        f"Steps to the loss of AllReduce(), {planner.table.provenance} ({planner.table.command}); "
        "on your task thinwire compare measures them. Time is that to the loss, of the recommended one 1.",
        markup=False,
    )
    if planner.timings.oldest is not None:
        out.print(_timings_in_words(planner.timings), markup=False)
    if not counted:
        out.print(
            "What messages take from the processors that compute is not counted: thinwire doctor measures it on your "
            "machines, and --doctor FILE counts it.",
            markup=False,
        )


def _timings_in_words(timings: Timings) -> str:
    assert timings.oldest is not None, "only called where something was timed"
    if not timings.kept:
        return f"All {timings.measured} timings were measured now, and are kept in {timings.path}."
    oldest = datetime.fromtimestamp(timings.oldest).strftime("%Y-%m-%d %H:%M")
    return (
        f"{timings.kept} timings of this machine were kept from earlier plans, the oldest from {oldest} "
        f"({timings.path}), and {timings.measured} were measured now; --measure-again measures all of them."
    )


def _row(name: str, width: int, figures: tuple[str, ...]) -> str:
    *columns, last = figures
    return f"{name:<{width}}" + "".join(f"{each:>10}" for each in columns) + f"  {last}"


def why(options: list[Option], chosen: Option) -> str:
    """Say in a few sentences why an option was chosen."""
    from thinwire.planning.plan.candidates import DENSE

    dense = next((each for each in options if each.recipe == DENSE and each.mesh is None and each.prediction), None)
    found = chosen.prediction
    assert found is not None, "what is chosen can serve"
    if dense is None or dense.prediction is None:
        reason = f"It needs the least time to the loss: {seconds(found.seconds)} a step."
    elif chosen is dense:
        reason = (
            f"A step takes {seconds(found.seconds)}, of which {seconds(found.exposed)} are waits for the network. "
            "Nothing else would reach the loss clearly sooner, and nothing changes training less."
        )
    else:
        plain = dense.prediction
        reason = (
            f"AllReduce() would wait {seconds(plain.exposed)} in each step of {seconds(plain.seconds)}; this waits "
            f"{seconds(found.exposed)} of {seconds(found.seconds)}, sending {nbytes(found.payload_bytes)} instead of "
            f"{nbytes(plain.payload_bytes)}. With the steps that it needed where that was measured it reaches the loss "
            f"{digits(dense.to_loss / chosen.to_loss)} times as soon."
        )
    return reason + _noise(options, chosen) + _missed(options, chosen)


def _noise(options: list[Option], chosen: Option) -> str:
    """Name what is within noise of the best, and the rule by which one of them was chosen; "" if nothing else is."""
    from thinwire.planning.plan.search import NEARLY, within_noise

    others = [each.name for each in within_noise(options) if each is not chosen]
    if not others:
        return ""
    which = f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} within noise of it"
    return f" {which} ({100 * (NEARLY - 1):.0f} % of the best); of these the one that changes training least is chosen."


def _missed(options: list[Option], chosen: Option) -> str:
    """Name the recipe that would be sooner where it reached the loss, and how often it did not; "" if there is none."""
    from thinwire.planning.plan.search import NEARLY

    sooner = [
        (each.seconds * max(1.0, each.accuracy.most), each, each.accuracy)
        for each in options
        if each.accuracy is not None and 0 < each.accuracy.missed < each.accuracy.runs
    ]
    took, option, accuracy = min(sooner, key=lambda each: each[0], default=(inf, chosen, None))
    if accuracy is None or took * NEARLY > chosen.to_loss:
        return ""
    return (
        f" {option.name} may be sooner still, but it never reached the loss in {accuracy.missed} of {accuracy.runs} "
        "measured runs; thinwire compare shows whether it does on your task."
    )


def _changes(crossings: list[Crossing], network: Network) -> str:
    from thinwire.planning.plan.search import FASTEST, SLOWEST, words_of_rate

    # Where links differ, one rate is not that of all.
    differ, usual = rates_differ(network), network.bits_per_second
    if not crossings and differ:
        between = f"{digits(min(1, SLOWEST / usual))} and {digits(max(1, FASTEST / usual))} times as fast"
        return f"Nothing would change that, were all links between {between}."
    if not crossings:
        return f"No link between {rate(SLOWEST)} and {rate(FASTEST)} would change that."
    words = {"slower": "below", "faster": "above"}
    each = [
        f"if all links were {digits(x.factor)} times as fast, {x.recipe}"
        if differ
        else f"{words[x.side]} {words_of_rate(x.bits_per_second)} {x.recipe}"
        for x in crossings
    ]
    return f"What would change that: {'; '.join(each)}."
