# SPDX-License-Identifier: Apache-2.0
"""The results of a sweep: its trials as rows and JSON, a summary, and the best trial as options of `thinwire train`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.space import Space
from thinwire.arrays.sweep.training import train_alone
from thinwire.arrays.sweep.trials import Outcome, ranked
from thinwire.core.storage.files import write_atomically
from thinwire.errors import ConfigError
from thinwire.lab.runs.settings import OptimizerName, as_toml

BEST = "best.toml"
"""The file with the best trial, for `thinwire train --config`."""
Fields = dict[str, Any]
_TRAINED = ("lr", "momentum", "weight_decay", "optimizer", "batch_size", "model_size")


@dataclass(frozen=True)
class Results:
    """The outcomes of a sweep.

    Args:
        plan: of the sweep.
        space: the hyperparameters that were searched.
        outcomes: of all trials.

    Example:
        >>> from thinwire.arrays.sweep.sampling import RandomSampler
        >>> from thinwire.arrays.sweep.space import parse_domain
        >>> from thinwire.arrays.sweep.sweeping import sweep
        >>> from thinwire.lab.tasks import load
        >>> plan, space = Plan(load("digits"), steps=2), Space({"lr": parse_domain("0.1")})
        >>> results = Results(plan, space, sweep(plan, RandomSampler(space, seed=0), 1))
        >>> results.summary()["best_hyperparameters"]
        {'lr': 0.1}
    """

    plan: Plan
    space: Space
    outcomes: Sequence[Outcome]

    @property
    def best(self) -> list[Outcome]:
        """The outcomes, best first."""
        return ranked(self.outcomes)

    @property
    def title(self) -> str:
        """Such as `64 trials of digits, 300 steps each`."""
        return f"{len(self.outcomes)} trials of {self.plan.task.name}, {self.plan.steps} steps each"

    def summary(self) -> Fields:
        """Return the best trial and how many were stopped or diverged, as JSON values."""
        best = self.best[0]
        adapter = {"best_adapter": f"adapters/trial-{best.trial.number}"} if self.plan.adapting is not None else {}
        return {
            "task": self.plan.task.name,
            "trials": len(self.outcomes),
            "steps": self.plan.steps,
            "best": best.trial.number,
            "best_loss": finite_or_none(best.loss),
            "best_metric": finite_or_none(best.metric),
            "best_hyperparameters": dict(best.trial.hyperparameters),
            "stopped": sum(each.stopped for each in self.outcomes),
            "diverged": sum(not math.isfinite(each.loss) for each in self.outcomes),
            **adapter,
        }

    def compare_alone(
        self, seconds: float, track: Callable[[Sequence[Outcome]], Iterable[Outcome]] = lambda each: each
    ) -> Fields:
        """Train the same trials one after another, and compare time and losses.

        Args:
            seconds: what the arrays took.
            track: wraps the outcomes, to show progress.
        """
        start = time.perf_counter()
        alone = [train_alone(self.plan, each.trial) for each in track(self.outcomes)]
        taken = time.perf_counter() - start
        # A trial that was stopped has fewer steps than its counterpart.
        pairs = [(a.loss, b.loss) for a, b in zip(self.outcomes, alone, strict=True) if not a.stopped]
        return {
            "sequential_seconds": taken,
            "speedup": taken / seconds,
            "same_best": ranked(alone)[0].trial.number == self.best[0].trial.number,
            "largest_difference": max((abs(a - b) for a, b in pairs if math.isfinite(a + b)), default=0.0),
        }

    def write(self, folder: Path, summary: Fields, options: Mapping[str, Any]) -> str:
        """Write trials.json, summary.json, the best trial as best.toml, and report.html if it can be drawn.

        Args:
            folder: of the files.
            summary: for summary.json.
            options: of `thinwire train` that say what was trained, such as its task and data.

        Returns:
            why best.toml was not written; "" if it was.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        missing = self.not_trainable()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "trials.json", json.dumps(trials_as_json(self.best), indent=2).encode())
            write_atomically(folder / "summary.json", json.dumps(summary, indent=2).encode())
            if not missing:
                values = {name.replace("_", "-"): x for name, x in self.best_options(options).items()}
                head = f"thinwire train --config {BEST} trains the best trial again"
                write_atomically(folder / BEST, as_toml(values, head=head).encode())
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written to ({error.strerror}). Use another --out") from None
        return missing

    def not_trainable(self) -> str:
        """Return why `thinwire train` cannot train the best trial; "" if it can."""
        best = self.best[0].trial.hyperparameters
        if self.plan.adapting is not None:
            return "thinwire train has no adapters; the best ones are saved"
        optimizer = self.plan.setting(best).optimizer
        if optimizer not in get_args(OptimizerName):
            return f"thinwire train has no optimizer {optimizer}"
        others = [name for name in best if name not in _TRAINED]
        return f"thinwire train has no --{others[0].replace('_', '-')}" if others else ""

    def best_options(self, options: Mapping[str, Any]) -> Fields:
        """Return the options of `thinwire train` that train the best trial again, as one worker."""
        setting, own = self.plan.setting(self.best[0].trial.hyperparameters), "model" in options
        chosen: Fields = {name: getattr(setting, name) for name in _TRAINED}
        if setting.optimizer != "sgd":
            del chosen["momentum"]
        for name in ("batch_size", "model_size") if own else ():  # the user's functions decide
            del chosen[name]
        plan = self.plan
        return {**options, **chosen, "steps": plan.steps, "schedule": plan.schedule, "seed": plan.seed, "workers": 1}

    def write_page(self, folder: Path) -> Path:
        """Draw report.html with a picture of every hyperparameter, and return its path.

        Raises:
            ModuleNotFoundError: matplotlib, which is an extra, is not installed.
        """
        from thinwire.lab.report.sweep import write_sweep

        domains, best = self.space.domains, self.best
        return write_sweep(
            folder,
            {name: [each.trial.hyperparameters[name] for each in best] for name in domains},
            [each.loss for each in best],
            [each.stopped for each in best],
            logarithmic=[name for name, domain in domains.items() if getattr(domain, "scale", "") == "log"],
            title=self.title,
            headings=headings_of(self.space),
            rows=rows_of(self.space, best),
        )


def finite_or_none(value: float) -> float | None:
    """A number as JSON can have it: None where a trial has diverged, because JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def trials_as_json(best: Sequence[Outcome]) -> list[Fields]:
    """Trials as JSON values, for `trials.json`."""
    rows = [each.to_json() for each in best]
    return [{**row, **{name: finite_or_none(row[name]) for name in ("loss", "metric")}} for row in rows]


def headings_of(space: Space) -> list[str]:
    """Return the column headings of `rows_of`."""
    return ["trial", *space.domains, "held-out loss", "metric", "steps"]


def rows_of(space: Space, best: Sequence[Outcome]) -> list[list[str]]:
    """Trials as the rows of a table."""
    return [
        [
            str(each.trial.number),
            *(short(each.trial.hyperparameters[name]) for name in space.domains),
            f"{each.loss:.4f}",
            f"{each.metric:.4f}",
            f"{each.steps}{', stopped' if each.stopped else ''}",
        ]
        for each in best
    ]


def short(value: object) -> str:
    """Return a value with three digits if it is not whole."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def summary_text(summary: Fields) -> str:
    """Return a sweep's summary in one or two lines."""
    lines = [f"{summary['seconds']:.1f} s, {summary['stopped']} stopped early, {summary['diverged']} diverged"]
    if "sequential_seconds" in summary:
        same = "the same best trial" if summary["same_best"] else "another best trial"
        lines.append(
            f"one after another {summary['sequential_seconds']:.1f} s, {summary['speedup']:.1f} times as long; "
            f"{same}, losses at most {summary['largest_difference']:.1e} apart"
        )
    return "\n".join(lines)
