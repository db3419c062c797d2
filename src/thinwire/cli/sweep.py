# SPDX-License-Identifier: Apache-2.0
"""`thinwire sweep`: search a task's hyperparameters, with many trials trained as one array."""

from __future__ import annotations

import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from thinwire.cli.console import err, out, print_json
from thinwire.cli.options import check_folder, command_line, default_folder, save_config
from thinwire.cli.progress import Bar
from thinwire.errors import ConfigError
from thinwire.lab.runs.settings import option_name

if TYPE_CHECKING:
    from thinwire.arrays.sweep.adapting import Adapting
    from thinwire.arrays.sweep.plan import Plan
    from thinwire.arrays.sweep.space import Domain, Space
    from thinwire.arrays.sweep.sweeping import Progress
    from thinwire.lab.tasks import Task

_HYPERPARAMETERS = (
    "lr momentum weight_decay beta1 beta2 eps alpha rho lr_decay rank lora_alpha lora_dropout adapter_seed "
    "optimizer batch_size model_size"
)
# Options that do not decide the results, and so may change when a sweep is resumed.
_MAY_CHANGE = ("data", "out", "resume", "overwrite", "json", "check", "threads")
_JOURNAL = "journal"
_UPDATE_SECONDS = 0.5
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Search the hyperparameters of a task, with many trials trained as one array.

    Example: thinwire sweep --task digits --trials 64 --lr log:1e-4:1e-1 --momentum 0:0.95

    A hyperparameter is given as a range (log:1e-4:1e-1, 0:0.95, whole:8:64), as a list (16,32,64) or as a value.
    Trials that differ only in learning rate, momentum, weight decay, betas and eps share an array; others are trained
    in separate arrays. The default of --lr is log:1e-4:1e-1. Writes trials.json, summary.json, report.html with a
    picture of every hyperparameter, and best.toml, with which thinwire train trains the best trial.

    Args:
        task: text, digits, mnist, cifar10, shakespeare, wikitext2, agnews or a9a; digits unless given.
        own_model: instead of a task, MODULE:FUNCTION of yours that returns the model. Needs --data and --loss.
        own_loss: with --model, MODULE:FUNCTION from (outputs, targets) to the mean loss.
        adapters: train adapters of LoRA around the model, which stays frozen; saves each as a folder of PEFT.
        targets: with --adapters, names of the adapted layers, such as q_proj,v_proj; PEFT's for the model unless given.
        trials: number of trials.
        steps: optimizer steps of a trial that is not stopped early.
        lr: learning rates.
        momentum: momenta of sgd and rmsprop.
        weight_decay: weight decays.
        beta1: decay rates of the first moment of adam, adamw and lamb.
        beta2: decay rates of their second moment.
        eps: epsilons of all but sgd.
        alpha: decay rates of rmsprop's squares.
        rho: decay rates of adadelta's squares.
        lr_decay: decays of adagrad's learning rate.
        rank: ranks of adapters; 8 unless given.
        lora_alpha: scales of adapters, times their rank; twice the rank unless given.
        lora_dropout: dropout rates of adapters.
        adapter_seed: seeds of adapters' initial values and dropout.
        optimizer: sgd, adam, adamw, lamb, adagrad, rmsprop, adadelta, or several of them, such as sgd,adamw.
        batch_size: examples per step.
        model_size: named sizes of the task's model.
        schedule: constant, or cosine down to a tenth at the last step.
        sampler: random, or optuna, which learns from finished trials and proposes a quarter of them at a time.
        halving: stop trials early: steps before the first rung; at each rung the best continue.
        keep: with halving, one of so many trials continues.
        together: most trials in one array, and most that are proposed at a time; as many as fit unless given.
        check: train the trials one after another too, and compare losses and time.
        seed: seed of the draws, the initial parameters and the order of data.
        eval_limit: number of held-out examples; all unless given.
        threads: threads of computation; all cores unless given.
        data: folder of data files; default THINWIRE_DATA. With --model, MODULE:FUNCTION from (rank, size, seed) to
            batches, or to batches and held-out batches.
        out: output folder; runs/TASK-sweep-TIME unless given.
        resume: folder of an interrupted sweep to resume, with the options that it began with; functions of yours are
            named again.
        overwrite: replace an unfinished sweep in the output folder.
        json: print everything as JSON.
    """

    task: str | None = None
    own_model: str | None = None
    own_loss: str | None = None
    adapters: bool = False
    targets: str | None = None
    trials: int = 16
    steps: int = 300
    lr: str | None = None
    momentum: str | None = None
    weight_decay: str | None = None
    beta1: str | None = None
    beta2: str | None = None
    eps: str | None = None
    alpha: str | None = None
    rho: str | None = None
    lr_decay: str | None = None
    rank: str | None = None
    lora_alpha: str | None = None
    lora_dropout: str | None = None
    adapter_seed: str | None = None
    optimizer: str | None = None
    batch_size: str | None = None
    model_size: str | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    sampler: Literal["random", "optuna"] = "random"
    halving: int | None = None
    keep: int = 3
    together: int | None = None
    check: bool = False
    seed: int = 0
    eval_limit: int | None = None
    threads: int | None = None
    data: Path | None = None
    out: Path | None = None
    resume: Path | None = None
    overwrite: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Sweep, write and show; returns 0."""
        folder = self.resume or self.out or default_folder(self._name, "sweep")
        try:
            with _terminated_like_interrupted():
                return (self if self.resume is None else self._resumed(folder))._run(folder, resume=bool(self.resume))
        except KeyboardInterrupt:
            from thinwire.arrays.sweep.journal import begun

            if begun(folder / _JOURNAL):
                again = (("model", self.own_model), ("data", self.data), ("loss", self.own_loss))
                options = "".join(f" --{name} {shlex.quote(str(x))}" for name, x in again if x is not None)
                err.print(f"to resume: thinwire sweep --resume {shlex.quote(str(folder))}{options}")
            else:
                err.print("nothing was begun, so nothing is lost: give the same command again")
            raise

    def _run(self, folder: Path, *, resume: bool = False) -> int:
        # Imported here, because `thinwire --help` must not wait for torch.
        from rich.progress import track

        from thinwire.arrays.fusion import keep_memory
        from thinwire.arrays.sweep.journal import Journal
        from thinwire.arrays.sweep.results import BEST, Results, headings_of, rows_of, summary_text, trials_as_json
        from thinwire.arrays.sweep.sampling import sampler_of
        from thinwire.arrays.sweep.sweeping import check_counts, sweep

        keep_memory()
        check_counts(self.trials, self.together)
        space = self._space()
        plan = self._plan(folder)
        # Every check comes before the folder is made: a mistyped option leaves nothing behind.
        plan.check(space)
        sampler = sampler_of(self.sampler, space, seed=self.seed)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written to ({error.strerror}). Use another --out") from None
        journal = Journal(folder / _JOURNAL, self._settings(), resume=resume, overwrite=self.overwrite)
        save_config(folder, Sweep, "sweep", {field.name: getattr(self, field.name) for field in fields(self)})
        # A sampler that learns needs the outcomes of some trials before it proposes others.
        at_once = -(-self.trials // 4) if self.sampler == "optuna" and self.together is None else None
        counts = {"together": self.together, "at_once": at_once}
        with progress_display(self.trials, self.steps) as callback:
            outcomes = sweep(plan, sampler, self.trials, **counts, callback=callback, journal=journal)
        found = Results(plan, space, outcomes)
        summary = {**found.summary(), "seconds": journal.seconds, "command": command_line()}
        if self.check:
            summary |= found.compare_alone(journal.seconds, lambda each: track(each, "one after another", console=err))
        missing = found.write(folder, summary, self._trained_options())
        try:
            page = found.write_page(folder)
        except ModuleNotFoundError:
            page = folder  # matplotlib is an optional dependency
        command = None if missing else f"thinwire train --config {shlex.quote(str(folder / BEST))}"
        if self.json:
            print_json({**summary, "trials": trials_as_json(found.best), "folder": folder, "best_command": command})
            return 0
        out.table(found.title, headings_of(space), rows_of(space, found.best[:10]))
        out.print(summary_text(summary))
        out.print(f"{page}")
        out.print(f"no {BEST}: {missing}" if missing else f"to train the best trial: {command}")
        return 0

    def _trained_options(self) -> Fields:
        """Return the options of `thinwire train` that say what was trained."""
        own = {"model": self.own_model, "loss": self.own_loss} if self.own_model is not None else {"task": self._name}
        given: Fields = {**own, "data": self.data, "eval_limit": self.eval_limit}
        return {name: value for name, value in given.items() if value is not None}

    def _settings(self) -> Fields:
        """Return the options that decide a sweep's results, as JSON values."""
        own_data = None if self.own_model is None else str(self.data)  # a function, not where a folder lies
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _MAY_CHANGE}
        return {**given, "own_data": own_data}

    def _resumed(self, folder: Path) -> Sweep:
        """Return the sweep with the options that it began with; options that contradict them are errors."""
        from thinwire.arrays.sweep.journal import settings_in

        check_folder(folder, f"--resume {folder}", "A sweep is resumed from the folder that it began in")
        if self.out is not None:
            raise ConfigError(f"--out {self.out}: a sweep is resumed in its own folder, {folder}. Leave it out")
        if self.overwrite:
            raise ConfigError(f"--overwrite with --resume {folder}: resuming overwrites nothing. Leave out one of them")
        defaults, now = Sweep()._settings(), self._settings()
        before = defaults | settings_in(folder / _JOURNAL)
        self._check_named_again(folder, before)
        # An option that is given again with the value it began with is allowed, and so is one at its default.
        for name, value in now.items():
            if value not in (defaults[name], before[name]):
                option = {"own_data": "data"}.get(name, option_name(name))
                begun = "without it" if before[name] is None else f"with {before[name]}"
                raise ConfigError(f"--{option} {value}: the sweep began {begun}. Leave it out")
        return replace(self, **{name: value for name, value in before.items() if name != "own_data"})

    def _check_named_again(self, folder: Path, before: Fields) -> None:
        """Refuse to import a function that only a file names."""
        data = None if before["own_model"] is None else before["own_data"]
        began = {"model": before["own_model"], "data": data, "loss": before["own_loss"]}
        named = {name: value for name, value in began.items() if value is not None}
        given = {"model": self.own_model, "data": self.data, "loss": self.own_loss}
        if any(given[name] is None for name in named):
            options = " ".join(f"--{name} {value}" for name, value in named.items())
            words = "it trains functions of yours, and files import nothing; if you trust them, add"
            raise ConfigError(f"--resume {folder}: {words} {options}")

    def _adapting(self, folder: Path) -> Adapting | None:
        from thinwire.arrays.sweep.adapting import Adapting

        if not self.adapters:
            if self.targets is not None:
                raise ConfigError(f"--targets {self.targets}: belongs to a sweep over adapters. Add --adapters")
            return None
        names = [] if self.targets is None else [name.strip() for name in self.targets.split(",")]
        return Adapting(tuple(filter(None, names)), folder / "adapters")

    def _plan(self, folder: Path) -> Plan:
        import torch

        from thinwire.arrays.sweep.plan import Plan
        from thinwire.arrays.sweep.trials import Halving

        if self.threads is not None and not 1 <= self.threads <= 4096:
            raise ConfigError(f"--threads {self.threads}: must lie in 1..4096. Leave it out to use all cores")
        if self.halving is not None and self.halving >= self.steps:
            raise ConfigError(f"--halving {self.halving}: no rung within {self.steps} steps. Use a tenth of them")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return Plan(
            self._task(),
            self.steps,
            self.seed,
            self.schedule,
            None if self.halving is None else Halving(self.halving, self.keep),
            self.eval_limit,
            self._adapting(folder),
        )

    @property
    def _name(self) -> str:
        """Return what is searched: a task, or a model of the user's."""
        return self.own_model or self.task or "digits"

    def _task(self) -> Task:
        """Return the task; of a user's functions, after one batch was tried.

        Raises:
            ConfigError: options that exclude each other, or a function that cannot be used.
        """
        from thinwire.lab.runs.own_functions import task_of

        if self.own_model is not None and self.own_loss is None:
            raise ConfigError(
                f"--model {self.own_model}: a sweep computes the loss of each model from its outputs. Add --loss, "
                "such as --loss torch.nn.functional:cross_entropy"
            )
        given = {"task": self.task, "own_model": self.own_model, "own_loss": self.own_loss, "data": self.data}
        if self.own_model is None:
            return task_of({**given, "task": self._name})
        return task_of({**given, "batch_size": self.batch_size, "model": self.model_size, "seed": self.seed})

    def _space(self) -> Space:
        from thinwire.arrays.sweep.space import Space, parse_domain

        given = {name: text for name in _HYPERPARAMETERS.split() if (text := getattr(self, name)) is not None}
        domains: dict[str, Domain] = {}
        for name, text in ({"lr": "log:1e-4:1e-1"} | given).items():
            try:
                domains[name] = parse_domain(text)
            except ConfigError as error:
                raise ConfigError(f"--{name.replace('_', '-')} {error}") from None
        return Space(domains)


@contextmanager
def _terminated_like_interrupted() -> Generator[None]:
    """Within it, SIGTERM ends the command as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- for people --------------------------------------------------------------------------------------------------------


@contextmanager
def progress_display(trials: int, steps: int) -> Generator[Callable[[Progress], None]]:
    """Show how far a sweep is, and the lowest loss of its trials."""
    from thinwire.arrays.sweep.trials import ranked

    shown_at = -math.inf

    def update(progress: Progress) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at < _UPDATE_SECONDS:
            return  # losses come from the device
        shown_at = time.monotonic()
        running = [loss for _, loss in progress.current_losses()]
        best = ""
        if progress.ended:
            best = f", best held-out loss {ranked(progress.ended)[0].loss:.4f}"
        elif finite := [loss for loss in running if math.isfinite(loss)]:
            best = f", lowest loss of a batch {min(finite):.4f}"
        done = min(len(progress.ended) * steps + len(running) * progress.step, trials * steps)
        words = f"array {progress.array}, {progress.members} trials, step {progress.step}/{steps}{best}"
        bar.show(completed=done, total=trials * steps, words=words)

    with Bar("sweep") as bar:
        yield update
