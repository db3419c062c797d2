# SPDX-License-Identifier: Apache-2.0
"""The state of a sweep on disk, from which an interrupted sweep resumes with the same results, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from thinwire.arrays.fusion.checkpoints import read, write
from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.training import StepCallback, TrialArray, train_together
from thinwire.arrays.sweep.trials import Outcome, Trial
from thinwire.core.storage.rank_file import RankFile
from thinwire.errors import CheckpointError

Fields = dict[str, Any]
# The version of the layout of the file; a sweep can only be resumed from its own version.
_FORMAT = 4
# The numbers and hyperparameters of an array's trials, as the sampler proposed them.
Proposed = list[list[Any]]


class Journal:
    """The finished arrays of a sweep, and the state of the current one.

    A resumed sweep asks its sampler for the same trials again, and gets from here what was found before: how many
    trials fit into memory, and the outcomes of finished arrays. So samplers are not saved: a sampler that draws the
    same trials from the same seed continues as if the sweep had never been interrupted.

    Args:
        folder: the folder of this journal alone; None writes nothing.
        settings: JSON values that must be the same when the sweep is resumed.
        resume: continue from the journal in `folder`.
        overwrite: begin even if `folder` holds an unfinished sweep, which is lost.
        every_seconds: least time between two saves of the current array, in seconds.
        every_steps: the current array is saved at multiples of this number of steps only.
        on_write: called after each save of the current array, with the array and the outcomes known by then.

    Raises:
        CheckpointError: there is nothing to resume, or it belongs to another sweep or version; or an unfinished sweep
            would be lost.
    """

    def __init__(
        self,
        folder: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        every_seconds: float = 10.0,
        every_steps: int = 1,
        on_write: StepCallback | None = None,
    ) -> None:
        self.folder, self.settings, self._on_write = folder, dict(settings or {}), on_write
        self._every_seconds, self._every_steps = every_seconds, every_steps
        self._capacities: list[int] = []
        self._arrays: list[Fields] = []
        self._current: Fields | None = None  # of the array that was being trained when the sweep was interrupted
        # How many capacities and arrays this process has asked for; those already in the lists are not made again.
        self._capacities_asked = self._arrays_asked = 0
        self._seconds_before, self._started, self._complete = 0.0, time.monotonic(), False
        if resume:
            self._read()
        elif folder is not None:
            if not overwrite:
                _refuse_to_lose(folder)
            self._write()
        self._written = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time that the sweep has taken, including the time before the last save of an interrupted run."""
        return self._seconds_before + time.monotonic() - self._started

    def capacity(self, measure: Callable[[], int]) -> int:
        """How many trials fit into memory: the result of `measure`, or what it returned before the interruption."""
        self._capacities_asked += 1
        if self._capacities_asked > len(self._capacities):
            self._capacities.append(measure())
            # A resumed sweep must not measure another one.
            self._write(self._current)
        return self._capacities[self._capacities_asked - 1]

    def train(self, plan: Plan, trials: Sequence[Trial], callback: StepCallback | None = None) -> list[Outcome]:
        """Train trials as one array: from the start, from where it was interrupted, or not at all if it has finished.

        Raises:
            CheckpointError: the array had other trials before the interruption.
        """
        self._arrays_asked += 1
        proposed: Proposed = [[trial.number, dict(trial.hyperparameters)] for trial in trials]
        if self._arrays_asked <= len(self._arrays):
            before = self._arrays[self._arrays_asked - 1]
            self._check_trials(before["trials"], proposed)
            return [Outcome.from_json(fields) for fields in before["outcomes"]]
        # Only the first array that is trained after resuming continues from a saved state.
        begun: tuple[TrialArray, list[Outcome]] | None = None
        saved, self._current = self._current, None
        if saved is not None:
            self._check_trials(saved["trials"], proposed)
            ended = [Outcome.from_json(fields) for fields in saved["ended"]]
            begun = TrialArray.from_state_dict(plan, saved["run"]), ended
        outcomes = train_together(plan, trials, callback, begun=begun, save=partial(self._save_if_due, proposed))
        self._arrays.append({"trials": proposed, "outcomes": [each.to_json() for each in outcomes]})
        self._write()
        return outcomes

    def mark_complete(self) -> None:
        """Record that the sweep has finished, so that another sweep may begin in the folder."""
        if not self._complete:
            self._complete = True
            self._write()

    def _check_trials(self, before: Proposed, now: Proposed) -> None:
        if before != now:
            raise CheckpointError(
                f"{self.folder}: array {self._arrays_asked} had trials with other hyperparameters than the sampler "
                "proposes now. Resume with the same seed, and the same version of its library"
            )

    def _save_if_due(self, proposed: Proposed, run: TrialArray, ended: Sequence[Outcome]) -> None:
        due = time.monotonic() - self._written >= self._every_seconds and run.step % self._every_steps == 0
        if self.folder is None or not due:
            return
        outcomes = [each.to_json() for each in ended]
        self._write({"trials": proposed, "run": run.state_dict(), "ended": outcomes})
        if self._on_write is not None:
            self._on_write(run, ended)

    def _write(self, current: Fields | None = None) -> None:
        if self.folder is None:
            return
        content = {
            "format": _FORMAT,
            "settings": self.settings,
            "capacities": self._capacities,
            "arrays": self._arrays,
            "current": current,
            "complete": self._complete,
            "seconds": self.seconds,
        }
        try:
            write(self.folder, content)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be written to ({error}). Free some space, and resume"
            ) from error
        self._written = time.monotonic()

    def _read(self) -> None:
        if self.folder is None:
            raise CheckpointError("resume=True without a folder: there is nothing to resume from. Give the folder")
        content = _content(self.folder)
        before, now = content["settings"], self.settings
        # What an older version did not write down cannot be compared.
        for name in before:
            if before[name] != now.get(name):
                raise CheckpointError(
                    f"{self.folder}: {name} was {before[name]} and is {now.get(name)} now. Resume with the "
                    "settings that the sweep began with"
                )
        self._capacities, self._arrays = content["capacities"], content["arrays"]
        self._current, self._seconds_before = content["current"], content["seconds"]
        self._complete = content["complete"]


def begun(folder: Path) -> bool:
    """Return True if there is a journal in a folder, from which a sweep can be resumed."""
    return RankFile(folder, 0).path.exists()


def settings_in(folder: Path) -> Fields:
    """Return the settings with which a journal's sweep began.

    Raises:
        CheckpointError: there is no journal, it is damaged, or another version wrote it.
    """
    settings: Fields = _content(folder)["settings"]
    return settings


def _content(folder: Path) -> Fields:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not there. A sweep is resumed from the folder that it began in")
    content = read(folder)
    if content.get("format") != _FORMAT:
        raise CheckpointError(
            f"{folder}: holds no journal of a sweep in this version's format. Resume with the version of thinwire that "
            "began it, or start a new sweep"
        )
    return content


def _refuse_to_lose(folder: Path) -> None:
    """Raise CheckpointError if the folder holds a sweep that has begun to train and has not finished."""
    if not begun(folder):
        return
    before = _content(folder)
    if before["complete"] or not (before["arrays"] or before["current"]):
        return
    raise CheckpointError(
        f"{folder}: holds an unfinished sweep. Continue it by --resume, use another folder by --out, or replace it by "
        "--overwrite"
    )
