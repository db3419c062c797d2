"""`thinwire sweep`: many trials of a task's hyperparameters for the price of few."""

from __future__ import annotations

import json as json_text
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from thinwire.cli.console import err, out
from thinwire.cli.options import command_line, default_folder
from thinwire.cli.trials import headings_of, lines_of, rows_of, show, watched, words_of
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.sweep.journal import Journal
    from thinwire.sweep.plan import Plan
    from thinwire.sweep.population import Population
    from thinwire.sweep.space import Domain, Space
    from thinwire.sweep.trials import Outcome

_KNOBS = ("lr", "momentum", "weight_decay", "beta1", "beta2", "eps", "optimizer", "batch_size", "model_size")
# What may change when a sweep goes on: where things are, how much is told, and how it is checked.
_FREE = ("data", "out", "resume", "anew", "json", "check", "threads")
_JOURNAL = "journal"
Fields = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Search the hyperparameters of a task: many trials trained as one array, for the price of few.

    Example: thinwire sweep --task digits --trials 64 --lr log:1e-4:1e-1 --momentum 0:0.95

    A hyperparameter is given as a range (log:1e-4:1e-1, 0:0.95, whole:8:64), as a list (16,32,64) or as a value.
    Trials that differ only in learning rate, momentum, weight decay, betas and eps share an array; others get one
    each. Without
    --lr it is log:1e-4:1e-1. Writes trials.json, summary.json and report.html with a picture of every hyperparameter.

    Args:
        task: text, digits, mnist, cifar10, shakespeare, wikitext2, agnews, multi30k or a9a.
        trials: how many.
        steps: optimizer steps of a trial that is not given up.
        lr: learning rates.
        momentum: of sgd.
        weight_decay: as the optimizer means it.
        beta1: of adamw.
        beta2: of adamw.
        eps: of adamw.
        optimizer: sgd, adamw, or both by a comma.
        batch_size: examples a step.
        model_size: named sizes of the task's model.
        schedule: constant, or cosine down to a tenth at the last step.
        sampler: random, or optuna, which learns from trials that have ended: it is asked for a quarter at a time.
        halving: give trials up, for the first time after so many steps; at each rung the best go on.
        keep: with halving, of so many trials one goes on.
        population: every so many steps the worst of an array go on as copies of the best, with other hyperparameters.
        share: with a population, of its members that are replaced.
        change: with a population, how far a copy's searched hyperparameters are moved.
        together: the most trials in one array, and the most that are proposed at a time; as many as fit unless given.
        check: train the trials one after another too, and compare losses and time.
        seed: of the draws, the first parameters and the order of data.
        eval_limit: held-out examples looked at; all unless given.
        threads: threads of computation; all cores unless given.
        data: the folder of data files; THINWIRE_DATA unless given.
        out: the folder; runs/TASK-sweep-TIME unless given.
        resume: the folder of a sweep that was interrupted, to go on with; all else is as it was begun.
        anew: begin in a folder whose sweep has not ended, and lose that one.
        json: print everything as JSON.
    """

    task: str = "digits"
    trials: int = 16
    steps: int = 300
    lr: str | None = None
    momentum: str | None = None
    weight_decay: str | None = None
    beta1: str | None = None
    beta2: str | None = None
    eps: str | None = None
    optimizer: str | None = None
    batch_size: str | None = None
    model_size: str | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    sampler: Literal["random", "optuna"] = "random"
    halving: int | None = None
    keep: int = 3
    population: int | None = None
    share: float = 0.25
    change: float = 0.2
    together: int | None = None
    check: bool = False
    seed: int = 0
    eval_limit: int | None = None
    threads: int | None = None
    data: Path | None = None
    out: Path | None = None
    resume: Path | None = None
    anew: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Sweep, write and show; returns 0."""
        if self.resume is not None:
            return self._resumed(self.resume)._run(self.resume, resume=True)
        return self._run(self.out or default_folder(self.task, "sweep"))

    def _run(self, folder: Path, *, resume: bool = False) -> int:
        from thinwire.fusion import keep_memory
        from thinwire.sweep.sampling import sampler_of
        from thinwire.sweep.sweeping import check_counts, sweep
        from thinwire.sweep.trials import ranked

        keep_memory()
        check_counts(self.trials, self.together)
        space = self._space()
        plan = self._plan(space)
        plan.check(space)
        sampler = sampler_of(self.sampler, space, seed=self.seed)
        journal = self._journal(folder, resume)
        # A sampler that learns must be told of some trials before it is asked for others.
        at_once = -(-self.trials // 4) if self.sampler == "optuna" and self.together is None else None
        counts = {"together": self.together, "at_once": at_once}
        try:
            with watched(self.trials, self.steps) as told:
                outcomes = sweep(plan, sampler, self.trials, **counts, told=told, journal=journal)
        except KeyboardInterrupt:
            err.print(f"to go on: thinwire sweep --resume {shlex.quote(str(folder))}", markup=False)
            raise
        seconds = journal.seconds
        best = ranked(outcomes)
        summary = self._summary(best, seconds) | (self._checked(plan, outcomes, seconds) if self.check else {})
        report = self._write(folder, space, best, summary)
        if self.json:
            out.print(json_text.dumps(summary | {"trials": lines_of(best), "folder": str(folder)}), markup=False)
            return 0
        show(self._title(), headings_of(space), rows_of(space, best[:10]))
        out.print(words_of(summary), markup=False)
        out.print(str(report or folder), markup=False)
        return 0

    def _facts(self) -> Fields:
        """What decides a sweep's results, as JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _FREE}

    def _resumed(self, folder: Path) -> Sweep:
        """The sweep as it was begun; refuse what was asked for otherwise."""
        from thinwire.sweep.journal import facts_in

        if self.out is not None:
            raise ConfigError(f"--out {self.out}: a sweep goes on in its own folder, {folder}; leave it out")
        if self.anew:
            raise ConfigError(f"--anew with --resume {folder}: to go on and to begin again are two things; take one")
        before, now, usual = facts_in(folder / _JOURNAL), self._facts(), Sweep()._facts()
        for name, value in now.items():
            if value not in (usual[name], before[name]):
                option = name.replace("_", "-")
                begun = "without it" if before[name] is None else f"with {before[name]}"
                raise ConfigError(f"--{option} {value}: the sweep was begun {begun}; leave it out")
        return replace(self, **before)

    def _journal(self, folder: Path, resume: bool) -> Journal:
        from thinwire.sweep.journal import Journal

        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written to ({error.strerror}); use another --out") from None
        return Journal(folder / _JOURNAL, self._facts(), resume=resume, anew=self.anew)

    def _plan(self, space: Space) -> Plan:
        import torch

        from thinwire.sweep.plan import Plan
        from thinwire.sweep.trials import Halving
        from thinwire.tasks import load

        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads {self.threads}: at least 1; leave it out to use all cores")
        if self.halving is not None and self.halving >= self.steps:
            raise ConfigError(f"--halving {self.halving}: no rung within {self.steps} steps; take a tenth of them")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return Plan(
            load(self.task, data=self.data),
            self.steps,
            self.seed,
            self.schedule,
            None if self.halving is None else Halving(self.halving, self.keep),
            self.eval_limit,
            self._population(space),
        )

    def _population(self, space: Space) -> Population | None:
        """What was asked for; every range that is searched is perturbed."""
        from thinwire.sweep.population import Population
        from thinwire.sweep.space import Range
        from thinwire.sweep.trials import FUSIBLE

        for name in ("share", "change") if self.population is None else ():
            if getattr(self, name) != getattr(Sweep, name):
                raise ConfigError(f"--{name} {getattr(self, name)}: belongs to --population STEPS; add it")
        if self.population is None:
            return None
        if self.sampler == "optuna":
            raise ConfigError(
                "--sampler optuna with --population: a member ends with other hyperparameters than were proposed, so "
                "that there is nothing to learn from; use --sampler random"
            )
        if self.check:
            raise ConfigError("--check with --population: members learn from each other; leave out --check")
        if 1 in (self.trials, self.together):
            raise ConfigError("--population with one trial in an array: there is nobody to go on from; take at least 2")
        if self.population >= self.steps:
            raise ConfigError(
                f"--population {self.population}: no exchange within {self.steps} steps; take a tenth of them"
            )
        ranges = [name for name, domain in space.domains.items() if isinstance(domain, Range) and name in FUSIBLE]
        return Population(self.population, self.share, self.change, tuple(ranges) or ("lr",))

    def _space(self) -> Space:
        from thinwire.sweep.space import Space, parse_domain

        told = {name: text for name in _KNOBS if (text := getattr(self, name)) is not None}
        domains: dict[str, Domain] = {}
        for name, text in ({"lr": "log:1e-4:1e-1"} | told).items():
            try:
                domains[name] = parse_domain(text)
            except ConfigError as error:
                raise ConfigError(f"--{name.replace('_', '-')} {error}") from None
        return Space(domains)

    def _title(self) -> str:
        return f"{self.trials} trials of {self.task}, {self.steps} steps each"

    def _summary(self, best: Sequence[Outcome], seconds: float) -> Fields:
        return {
            "task": self.task,
            "trials": len(best),
            "steps": self.steps,
            "seconds": seconds,
            "best": best[0].trial.number,
            "best_loss": best[0].loss,
            "best_metric": best[0].metric,
            "best_knobs": dict(best[0].trial.hyperparameters),
            "given_up": sum(each.stopped for each in best),
            "diverged": sum(not math.isfinite(each.loss) for each in best),
            "command": command_line(),
        }

    def _checked(self, plan: Plan, outcomes: Sequence[Outcome], seconds: float) -> Fields:
        """The same trials one after another: how long they take, and how far their losses are away."""
        from rich.progress import track

        from thinwire.sweep.training import train_alone
        from thinwire.sweep.trials import ranked

        start = time.perf_counter()
        alone = [train_alone(plan, each.trial) for each in track(outcomes, "one after another", console=err)]
        taken = time.perf_counter() - start
        pairs = [(a.loss, b.loss) for a, b in zip(outcomes, alone, strict=True) if not a.stopped]
        return {
            "alone_seconds": taken,
            "times_as_fast": taken / seconds,
            "same_best": ranked(alone)[0].trial.number == ranked(outcomes)[0].trial.number,
            "largest_difference": max((abs(a - b) for a, b in pairs if math.isfinite(a + b)), default=0.0),
        }

    def _write(self, folder: Path, space: Space, best: Sequence[Outcome], summary: Fields) -> Path | None:
        from thinwire.storage.files import write_atomically

        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "trials.json", json_text.dumps(lines_of(best), indent=2).encode())
            write_atomically(folder / "summary.json", json_text.dumps(summary, indent=2).encode())
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written to ({error.strerror}); use another --out") from None
        try:
            from thinwire.report.sweep import write_sweep
        except ModuleNotFoundError:
            return None
        return write_sweep(
            folder,
            {name: [each.trial.hyperparameters[name] for each in best] for name in space.domains},
            [each.loss for each in best],
            [each.stopped for each in best],
            logarithmic=[name for name, domain in space.domains.items() if getattr(domain, "scale", "") == "log"],
            title=self._title(),
            headings=headings_of(space),
            rows=rows_of(space, best),
        )
