# SPDX-License-Identifier: Apache-2.0
"""`thinwire compare`: several strategies on one task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.console import err, out, print_json
from thinwire.cli.options import default_folder, save_config, settings_as_options
from thinwire.cli.progress import Watch, show_summaries
from thinwire.core.units import workers
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.lab.runs import Comparison, Settings
    from thinwire.lab.runs.comparison import Start
    from thinwire.planning.plan.predict import ModelTime


_SINGLE_RUN_ONLY = (
    "strategy tensor_parallel coreset device save_every keep on_notice restarts timeline_steps tensorboard"
)


_STEP_BUDGET = 4.0
_NOT_COMPARED = {
    "compute": "the step takes what --step-seconds says, or what it takes here; workers may have a slowdown",
    "deaths": "a lost worker ends a comparison; thinwire simulate has deaths",
}


@dataclass(frozen=True, kw_only=True)
class Compare(settings_as_options(without=_SINGLE_RUN_ONLY.split())):
    """Run several strategies one after another, from the same parameters and on the same data in the same order.

    Example: thinwire compare --task text --strategies "ddp; LocalSGD(period=8); PushSum()" --workers 4 --link 100mbit

    All runs have the same settings. --steps, --seconds and --target-loss are the limits of each run, not of all
    together. Options that are not given take the task's defaults.

    With --model and --data, functions of your own take the place of the task: see docs/how-to/own-task.md.

    Args:
        strategies: recipes separated by semicolons; torch's own methods are ddp, ddp+bf16, ddp+powersgd and
            post-local-sgd.
        simulate: run the strategies' own code on simulated workers, with real gradients, in virtual time instead of on
            processes: times are those of the links alone, whatever this machine is. Torch's own methods cannot be.
        step_seconds: with --simulate, what a training step takes without communication, instead of timing it here; a
            third is taken as the forward pass.
        network: with --simulate, a network file (see thinwire simulate) instead of --link.
        rounds: how many times each strategy is run; round i has the seed --seed plus i. With more than one, the table
            has the mean and the standard deviation of losses, and the median of other figures, over all rounds.
        out: the comparison's folder; runs/TASK-compare-TIME unless given.
        markdown: print the table as Markdown.
        json: print the summaries as JSON.
    """

    strategies: str = (
        "ddp; LocalSGD(period=8); LocalSGD(period=8, codec=Quantize(4)); OverlapLocalSGD(period=8); PushSum()"
    )
    workers: int = 4
    simulate: bool = False
    step_seconds: float | None = None
    network: Path | None = None
    rounds: int = 1
    out: Path | None = None
    markdown: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Run every strategy; returns 0, or 1 where a run diverged."""
        from thinwire.lab.runs import launch, resolve
        from thinwire.lab.runs.recipes import split_recipes
        from thinwire.lab.runs.settings import without_decided

        if self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}: must be at least 1")
        self._check_simulation()
        recipes = split_recipes(self._recipes())
        settings, start = resolve({**self.given(), "strategy": recipes[0]}, emulated=not self.simulate), launch
        if self.simulate:
            settings, start = self._simulated(settings, recipes)
        folder = self.out or default_folder(settings.task, "compare")
        own = ("rounds", "simulate", "step_seconds", "network")
        values = {name: getattr(self, name) for name in own}
        values = {**without_decided(settings), "strategies": "; ".join(recipes), **values}
        done = run(
            settings,
            recipes,
            folder,
            rounds=self.rounds,
            title=title(settings, len(recipes), simulated=self.simulate, network=self.network),
            save=lambda: save_config(folder, Compare, "compare", values),
            start=start,
        )
        page = report(folder)
        if self.json:
            print_json(done.summaries)
            return int(bool(done.diverged))
        show(done, markdown=self.markdown)
        if self.simulate:
            out.print("all times are virtual: of simulated workers on a simulated network")
        out.print(str(page or folder))
        return int(bool(done.diverged))

    def _check_simulation(self) -> None:
        """Refuse options of a simulation without --simulate, and those that exclude each other."""
        if not self.simulate:
            for name, value in (("--step-seconds", self.step_seconds), ("--network", self.network)):
                if value is not None:
                    raise ConfigError(f"{name} {value}: is about simulated runs. Add --simulate, or leave it out")
        link = self.given()["link"]
        if self.network is not None and link is not None:
            raise ConfigError(f"--network {self.network} and --link {link}: both say what the network is. Give one")
        if self.step_seconds is not None and not 0 < self.step_seconds < 1e6:
            raise ConfigError(f"--step-seconds {self.step_seconds}: must be positive seconds, such as 0.25")

    def _recipes(self) -> str:
        """Return the recipes; without --strategies, a simulation has AllReduce() in place of torch's own method."""
        unchanged = self.strategies == Compare.strategies
        return self.strategies.replace("ddp;", "AllReduce();") if self.simulate and unchanged else self.strategies

    def _simulated(self, settings: Settings, recipes: Sequence[str]) -> tuple[Settings, Start]:
        """Return what makes runs in virtual time, and their settings."""
        from thinwire.lab.runs.defaults import default_timeout
        from thinwire.lab.runs.own_functions import load_task
        from thinwire.lab.runs.simulated import SimulatedRuns, check_simulated
        from thinwire.planning.plan.networks import check_entries
        from thinwire.planning.plan.predict import ModelTime
        from thinwire.planning.simulate import load_network

        check_simulated(settings, recipes)
        network = None if self.network is None else load_network(self.network, name=f"--network {self.network}")
        if network is not None:
            check_entries(network, f"--network {self.network}", _NOT_COMPARED)
            network.check(settings.workers)
            if self.given()["timeout"] is None:
                timeout = default_timeout(settings, load_task(settings), slowest=network.slowest)
                settings = replace(settings, timeout=timeout)
        if self.step_seconds is None:
            err.print("the model's training step, here")
            step = _time_step(settings)
        else:
            forward = self.step_seconds / 3
            step = ModelTime(forward, self.step_seconds - forward)
        return settings, SimulatedRuns(step, network)


def _time_step(settings: Settings) -> ModelTime:
    """Return the training step of the settings' model on this machine, timed without communication."""
    import torch

    from thinwire.lab.runs.optimizer import make_optimizer
    from thinwire.lab.runs.own_functions import load_task
    from thinwire.planning.doctor.speeds import time_steps
    from thinwire.planning.plan.predict import ModelTime

    task = load_task(settings)
    model = task.model(settings.model, seed=settings.seed)
    shard = task.shards(settings.copies, split=settings.split, seed=settings.seed)[0]
    batch = task.batch(shard, 0, batch_size=settings.batch_size, seed=settings.seed, rank=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        optimizer = make_optimizer(model, settings)
        step = time_steps(settings.task, model, optimizer, lambda: task.loss(model, batch), budget=_STEP_BUDGET)
    finally:
        torch.set_num_threads(threads)
    return ModelTime(step.forward, step.backward, step.update, tuple(step.ready))


def run(
    settings: Settings,
    recipes: Sequence[str],
    folder: Path,
    *,
    rounds: int,
    title: str,
    save: Callable[[], None] = lambda: None,
    start: Start | None = None,
) -> Comparison:
    """Run a comparison and show its progress; `save` is called when the folder is there."""
    from thinwire.lab.runs import compare, launch

    with ExitStack() as contexts:
        watches: list[Watch] = []

        def begin(recipe: str, place: int) -> None:
            if place == 0:
                save()
            # Ends the progress line of the run before.
            contexts.close()
            label = f"[{place + 1}/{rounds * len(recipes)}] {recipe}"
            watches[:] = [contexts.enter_context(Watch(label, settings.steps, settings.seconds))]

        return compare(
            settings,
            recipes,
            folder,
            rounds=rounds,
            title=title,
            listener=lambda event: watches[0](event),
            begin=begin,
            start=start or launch,
        )


def title(settings: Settings, count: int, *, simulated: bool = False, network: Path | None = None) -> str:
    """Return the comparison's title: how many strategies, the task, the workers and the links."""
    link = f" over {settings.link or network}" if settings.link or network else ""
    link += ", simulated" * simulated
    size = "" if settings.own_model is not None else f" ({settings.model})"
    return f"{count} strategies on {settings.task}{size}, {workers(settings.workers)}{link}"


def show(done: Comparison, *, markdown: bool = False) -> None:
    """Print the table, which runs diverged, and what is known of the spread over rounds."""
    from thinwire.lab.report import markdown as as_markdown

    if markdown:
        out.print(as_markdown(done.summaries), end="")
    else:
        show_summaries(done.summaries)
    for recipe, number, words in done.diverged:
        which = f"{recipe}, round {number + 1}" if len(done.rounds[0]) > 1 else recipe
        err.print(f"{which} diverged: {words}")
    if len(done.rounds[0]) > 1:
        seeds = ", ".join(str(each["seed"]) for each in done.rounds[0] if "seed" in each)
        out.print(f"losses: mean ± standard deviation over seeds {seeds}; other figures: medians")
        paces = done.spread("seconds_per_step")
        for recipe, summaries, (least, most) in zip(done.strategies, done.rounds, paces, strict=True):
            if math.isfinite(least):
                timed = sum(each["seconds_per_step"] is not None for each in summaries)
                of = "" if timed == len(summaries) else f"{timed} of "
                out.print(f"{recipe}: {least:.3g} to {most:.3g} s/step over {of}{len(summaries)} rounds")


def report(folder: Path) -> Path | None:
    """Write the comparison's page and return its path; where it cannot be drawn, print the reason and return None."""
    from thinwire.lab.report import write_report

    try:
        return write_report(folder).report
    except ConfigError as error:
        err.print(f"no report: {error}")
        return None
