# SPDX-License-Identifier: Apache-2.0
"""The runs of the race: one job makes one result; what is missing, in which order, and how long it takes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.paired import summary
from benchmarks.peers import install, installed, python_of
from benchmarks.race.checks import WHERE, WORKERS, check_name, first_of, whole_run
from benchmarks.race.racers import (
    BUDGET,
    EVALUATED_EVERY,
    LATER_LOCAL,
    LOCALS,
    MOST,
    OUTER_RATES,
    PAIRED_ROUNDS,
    SEEDS,
    SIZES,
    TUNING_EVALUATED_EVERY,
    TUNING_SEED,
    TUNING_STEPS,
    WORKS,
    Racer,
    ddp_of,
    named,
    of_task,
)
from benchmarks.race.results import PAIRED, RESULTS, Fields, best_try, is_enough, result, tune_names
from benchmarks.race.runs import curve, made, settings_of, step_times, steps_timed
from benchmarks.turns import measured

PARTS = ("tune", "losses", "times", "checks")
# Of a machine with two cores, to tell how long is left.
START_SECONDS, STEP_SECONDS, EVALUATION_SECONDS = 3.0, 0.55, 1.6


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        name: of its result, such as "losses/ddp-0".
        group: LINK/WORKERS/RACER, or -/4/RACER of a run without a link.
        seconds: about how long it takes.
        make: runs it.
        needs: what must be there first.
        library: in whose environment it runs.
        task: that it trains on.
    """

    name: str
    group: str
    seconds: float
    make: Callable[[], Fields]
    needs: tuple[Job, ...] = ()
    library: str | None = None
    task: str = "text"

    @property
    def part(self) -> str:
        """The part that it belongs to."""
        return self.name.split("/")[0]

    @property
    def done(self) -> bool:
        """Whether its result is there."""
        return result(self.name) is not None

    @property
    def _failure(self) -> Path:
        return RESULTS.folder / "failed" / f"{self.name.replace('/', '-')}.txt"

    @property
    def failed(self) -> bool:
        """Whether it ended without a result."""
        return self._failure.exists()

    def run(self) -> None:
        """Make the result, in the library's environment."""
        try:
            if self.library is None or sys.prefix == str(python_of(self.library).parents[1]):
                self._run_here()
            else:
                self._run_apart(self.library)
        except Exception:
            # What a process of its own has written says more.
            if not self.failed:
                self._failure.parent.mkdir(parents=True, exist_ok=True)
                self._failure.write_text(traceback.format_exc())
            raise

    def _run_apart(self, library: str) -> None:
        if not installed(library):
            install(library)
        # The environment does not know this checkout.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [str(python_of(library)), "-m", "benchmarks.race", "run", self.name]
        subprocess.run(command, check=True, env=environment)

    def _run_here(self) -> None:
        if self.library is not None:
            importlib.import_module(f"benchmarks.peers.{self.library}")
        found = self.make()
        RESULTS.put(self.name, found, file=self.task)


# -- the jobs ----------------------------------------------------------------------------------------------------------


def training_seconds(steps: int, evaluations: int, workers: int = 4) -> float:
    """About how long training takes without a link."""
    return START_SECONDS * workers / 4 + steps * STEP_SECONDS * workers / 4 + evaluations * EVALUATION_SECONDS


def tune_jobs(racer: Racer) -> tuple[Job, ...]:
    """The tries of a racer; those of the racer whose inner rate it takes come first."""
    own = racer.tuned_as
    inner = None if own.inner is None else named(own.inner)

    def attempt(place: int) -> Fields:
        best = None if inner is None else best_try(inner)
        rate = own.work.rates[place] if best is None else best["rate"]
        outer = None if best is None else OUTER_RATES[place]
        settings = settings_of(
            own, rate, outer, steps=TUNING_STEPS, seed=TUNING_SEED, eval_every=TUNING_EVALUATED_EVERY
        )
        return {"rate": rate, "outer": outer, **curve(settings)}

    seconds = training_seconds(TUNING_STEPS, TUNING_STEPS // TUNING_EVALUATED_EVERY + 1)
    needs = () if inner is None else tune_jobs(inner)
    return tuple(
        Job(name, f"-/4/{own.name}", seconds, lambda place=place: attempt(place), needs, own.library, own.task)
        for place, name in enumerate(tune_names(own))
    )


def curve_job(racer: Racer, seed: int) -> Job:
    """The curve of a seed, at the chosen rates."""
    first, own = ddp_of(racer.task), racer.curve_of
    most = BUDGET if own is first else MOST * BUDGET

    def make() -> Fields:
        best = best_try(own)
        assert best is not None
        settings = settings_of(own, best["rate"], best["outer"], steps=most, seed=seed, eval_every=EVALUATED_EVERY)
        found = curve(settings, (lambda _: False) if own is first else lambda found: is_enough(found, own.task, seed))
        return {"rate": best["rate"], "outer": best["outer"], "seed": seed, **found}

    needs = tune_jobs(own) + (() if own is first else (curve_job(first, seed),))
    steps = BUDGET if own is first else 1.3 * BUDGET
    seconds = training_seconds(round(steps), round(steps / EVALUATED_EVERY) + 1)
    return Job(f"losses/{own.name}-{seed}", f"-/4/{own.name}", seconds, make, needs, own.library, own.task)


def time_job(racer: Racer, link: str, workers: int) -> Job:
    """The seconds of a step on a link."""
    warm, timed, _ = steps_timed(racer, link)
    whole = 2 * (workers - 1) / workers * racer.work.bytes * 8 / _bits_per_second(link)
    share = {"ddp+bf16": 0.5, "AllReduce(codec=PowerSGD(rank=4))": 0.1}.get(racer.recipe, 1.0 if racer.dense else 0.0)
    # Some send whole gradients first; local methods send the parameters once in a period.
    exchanges = 2 if racer.timed is not None else timed / racer.period if not racer.dense else 0
    seconds = training_seconds(warm + timed, 2, workers) + (warm + timed) * share * whole + exchanges * whole * 0.8
    return Job(
        f"times/{link}-{workers}-{racer.name}",
        f"{link}/{workers}/{racer.name}",
        seconds,
        lambda: step_times(racer, link, workers),
        library=racer.library,
        task=racer.task,
    )


def paired_job() -> Job:
    """Steps of `AllReduce()` and DDP in turns, in the same processes."""

    def make() -> Fields:
        asked = settings_of(named("AllReduce"), 0.5, None, steps=1)
        found = measured("ddp", "none", workers=SIZES[0], rounds=PAIRED_ROUNDS, batch_size=asked.batch_size)
        return {**summary(found, baseline="ddp"), "made": made(asked)}

    return Job(PAIRED, f"none/{SIZES[0]}/AllReduce", START_SECONDS + 8 * PAIRED_ROUNDS * STEP_SECONDS, make)


def check_jobs() -> Iterator[Job]:
    """Whole runs; each needs all times of its link and all curves of its racers."""
    for link, own in WHERE:
        headline = [racer for racer in of_task("text") if racer.headline and (racer.whose == "thinwire") == own]
        needs = (
            *(curve_job(racer, SEEDS[0]) for racer in (named("ddp"), *headline)),
            *(time_job(racer, link, WORKERS) for racer in (LOCALS["text"], *headline)),
        )
        first = first_of(link, own)
        yield Job(
            check_name(link, own),
            f"{link}/{WORKERS}/{'' if first is None else first.name}",
            training_seconds(BUDGET, BUDGET // EVALUATED_EVERY + 1),
            lambda link=link, own=own: whole_run(link, own),
            needs,
            None if first is None else first.library,
        )


def _bits_per_second(link: str) -> float:
    return {"20mbit": 19e6, "100mbit": 95e6, "1gbit": 0.9e9, "none": 3e9, "100mbit+50ms": 70e6}[link]


def jobs() -> list[Job]:
    """All of them, in the order of the rule."""
    return list({job.name: job for job in _in_order()}.values())


def _in_order() -> Iterator[Job]:
    headline = [racer for racer in of_task("text") if racer.headline]
    others = [racer for racer in of_task("text") if not racer.headline]
    yield from _curves(headline, SEEDS[0])
    # All of a link together: exposed is what a step takes beyond the wall's of the same hours.
    yield from _times([LOCALS["text"], *headline], SIZES[0])
    yield paired_job()
    yield from check_jobs()
    for seed in SEEDS[1:]:
        yield from _curves(headline, seed)
    yield from _times([LOCALS["text"], *headline], SIZES[1])
    for task in WORKS:
        if task != "text":
            yield from _curves(of_task(task), SEEDS[0])
            yield from _times([LOCALS[task], *of_task(task)], SIZES[0])
    for link in dict.fromkeys(racer.link for racer in others):
        there = [racer for racer in others if racer.link == link]
        yield from (time_job(racer, link, SIZES[0]) for racer in (LATER_LOCAL, *there))
    yield from _curves(others, SEEDS[0])


def _curves(racers: Sequence[Racer], seed: int) -> Iterator[Job]:
    for racer in racers:
        job = curve_job(racer, seed)
        yield from (*(first for need in job.needs for first in need.needs), *job.needs, job)


def _times(racers: Sequence[Racer], workers: int) -> Iterator[Job]:
    task = racers[0].task
    for link, size in WORKS[task].places:
        if size == workers:
            yield from (time_job(racer, link, workers) for racer in racers)


# -- what is missing ---------------------------------------------------------------------------------------------------


def chosen(parts: Sequence[str], only: Sequence[str]) -> list[Job]:
    """The jobs of some parts that match a pattern, with those they need before them."""

    def with_needs(job: Job) -> Iterator[Job]:
        for need in job.needs:
            yield from with_needs(need)
        yield job

    wanted = [job for job in jobs() if (not parts or job.part in parts) and _matches(job.group, only)]
    return list({job.name: job for each in wanted for job in with_needs(each)}.values())


def _matches(group: str, only: Sequence[str]) -> bool:
    link, _, racer = group.split("/")
    # A pattern for a link says nothing of curves, which are made without one.
    return not only or any(
        fnmatch(group, pattern) or (link == "-" and fnmatch(racer, pattern.split("/")[-1])) for pattern in only
    )


def missing(parts: Sequence[str], only: Sequence[str]) -> list[Job]:
    """The jobs without a result, but for those that failed and what needs them."""
    left: list[Job] = []
    stuck: set[str] = set()
    for job in chosen(parts, only):
        if job.done:
            continue
        # A check compares those that could run.
        if job.failed or (job.part != "checks" and any(need.name in stuck for need in job.needs)):
            stuck.add(job.name)
        else:
            left.append(job)
    return left


def run_next(parts: Sequence[str], only: Sequence[str]) -> bool:
    """Run the first one that is missing; returns whether there was one.

    Raises:
        Exception: it ended without a result; it is not tried again, and the others do without it.
    """
    left = missing(parts, only)
    if not left:
        sys.stdout.write("nothing is missing\n")
        return False
    job, start = left[0], time.monotonic()
    sys.stdout.write(f"{job.name}: about {job.seconds / 60:.1f} minutes\n")
    sys.stdout.flush()
    job.run()
    rest = sum(each.seconds for each in left[1:])
    taken = (time.monotonic() - start) / 60
    sys.stdout.write(f"{job.name}: {taken:.1f} minutes; {len(left) - 1} runs left, about {rest / 3600:.1f} hours\n")
    sys.stdout.flush()
    return True
