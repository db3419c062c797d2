"""What a sweep has done so far, on disk: it goes on from there to the same results, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from thinwire.errors import CheckpointError
from thinwire.fusion.checkpoints import read, write
from thinwire.storage.rank_file import RankFile
from thinwire.sweep.plan import Plan
from thinwire.sweep.training import Seen, Together, train_together
from thinwire.sweep.trials import Copy, Outcome, Trial

Fields = dict[str, Any]
# What a journal looks like: one of another form cannot be gone on with.
_FORM = 2
# Numbers and hyperparameters of an array's trials, as they were proposed.
Begun = list[list[Any]]


class Journal:
    """What has come of a sweep's arrays so far, and how far the one under way has got.

    A sweep that goes on asks its sampler for the same trials again, and gets from here what it found out before: how
    many trials fit into memory, and what has come of arrays that have ended. So samplers need not be saved, and one
    that draws the same from the same seed goes on as if it had never stopped.

    Args:
        folder: of this journal alone; None keeps none.
        facts: what must be the same when a sweep goes on: JSON values.
        resume: go on from what is there.
        anew: begin where there is a sweep that has not ended, which is lost.
        every_seconds: how long an array trains between one writing and the next, at least.
        every_steps: how many steps it makes between them, at least.
        written: called after an array under way was written, with it and with the outcomes known by then.

    Raises:
        CheckpointError: there is nothing to go on from, or it is of another sweep or version; or a sweep that has not
            ended would be lost.
    """

    def __init__(
        self,
        folder: Path | None = None,
        facts: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        anew: bool = False,
        every_seconds: float = 10.0,
        every_steps: int = 1,
        written: Seen | None = None,
    ) -> None:
        self.folder, self.facts, self._told = folder, dict(facts or {}), written
        self._every_seconds, self._every_steps = every_seconds, every_steps
        self._rooms: list[int] = []
        self._arrays: list[Fields] = []
        self._under_way: Fields | None = None
        self._room = self._array = 0
        self._before, self._begun, self._ended = 0.0, time.monotonic(), False
        if resume:
            self._read()
        elif folder is not None:
            _refuse_to_lose(folder, anew)
            self._write()
        self._written = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the sweep has taken, the time before it was interrupted and last written included."""
        return self._before + time.monotonic() - self._begun

    def room(self, measure: Callable[[], int]) -> int:
        """How many trials fit: what was measured before, where it was."""
        self._room += 1
        if self._room > len(self._rooms):
            self._rooms.append(measure())
        return self._rooms[self._room - 1]

    def train(self, plan: Plan, trials: Sequence[Trial], told: Seen | None = None) -> list[Outcome]:
        """Train trials as one array, or from where it was interrupted, or not at all where it has ended before.

        Raises:
            CheckpointError: the array that was trained before was of other trials.
        """
        self._array += 1
        begun = [[trial.number, dict(trial.hyperparameters)] for trial in trials]
        if self._array <= len(self._arrays):
            before = self._arrays[self._array - 1]
            self._refuse_others(before["trials"], begun)
            return [_outcome(fields) for fields in before["outcomes"]]
        kept = partial(self._keep, begun)
        found = train_together(plan, trials, told, begun=self._go_on(plan, begun), kept=kept)
        self._under_way = None
        self._arrays.append({"trials": begun, "outcomes": [fields_of(each) for each in found]})
        self._write()
        return found

    def end(self) -> None:
        """Note that nothing is left to be done: another sweep may begin in the folder."""
        if not self._ended:
            self._ended = True
            self._write()

    def _go_on(self, plan: Plan, begun: Begun) -> tuple[Together, list[Outcome]] | None:
        saved, self._under_way = self._under_way, None
        if saved is None:
            return None
        self._refuse_others(saved["trials"], begun)
        return Together.restored(plan, saved["run"]), [_outcome(fields) for fields in saved["ended"]]

    def _refuse_others(self, before: Begun, now: Begun) -> None:
        if before != now:
            raise CheckpointError(
                f"{self.folder}: array {self._array} had trials with other hyperparameters than the sampler proposes "
                "now; go on with the same seed, and the same version of its library"
            )

    def _keep(self, begun: Begun, run: Together, ended: Sequence[Outcome]) -> None:
        waited = time.monotonic() - self._written >= self._every_seconds
        if self.folder is None or not waited or run.step % self._every_steps:
            return
        self._write({"trials": begun, "run": run.state(), "ended": [fields_of(each) for each in ended]})
        if self._told is not None:
            self._told(run, ended)

    def _write(self, under_way: Fields | None = None) -> None:
        if self.folder is None:
            return
        content = {
            "form": _FORM,
            "facts": self.facts,
            "rooms": self._rooms,
            "arrays": self._arrays,
            "under_way": under_way,
            "ended": self._ended,
        }
        try:
            write(self.folder, {**content, "seconds": self.seconds})
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be written to ({error}); make room, and go on with it"
            ) from error
        self._written = time.monotonic()

    def _read(self) -> None:
        if self.folder is None:
            raise CheckpointError("a sweep without a folder has nothing to go on from")
        content = _content(self.folder)
        refuse_other_facts(self.folder, content["facts"], self.facts)
        self._rooms, self._arrays = content["rooms"], content["arrays"]
        self._under_way, self._before = content["under_way"], content["seconds"]
        self._ended = content.get("ended", False)


def facts_in(folder: Path) -> Fields:
    """What a journal's sweep was begun with.

    Raises:
        CheckpointError: there is none, it is damaged, or another version wrote it.
    """
    found: Fields = _content(folder)["facts"]
    return found


def _content(folder: Path) -> Fields:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not there; a sweep goes on in the folder it was begun in, which has one")
    found = read(folder)
    if found.get("form") != _FORM:
        raise CheckpointError(
            f"{folder}: holds no journal of a sweep as this version of thinwire keeps it; go on with the version that "
            "began it, or begin anew"
        )
    return found


def _refuse_to_lose(folder: Path, anew: bool) -> None:
    if anew or not RankFile(folder, 0).path.exists():
        return
    before = _content(folder)
    if before.get("ended") or not (before["arrays"] or before["under_way"]):
        return
    raise CheckpointError(
        f"{folder}: holds a sweep that has not ended; go on with it by --resume, take another folder by --out, or give "
        "it up by --anew"
    )


def refuse_other_facts(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another sweep.

    Raises:
        CheckpointError: naming the first difference.
    """
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise CheckpointError(
                f"{folder}: {name} was {before.get(name)} and is {now.get(name)} now; a sweep goes on as it was begun"
            )


def fields_of(outcome: Outcome) -> Fields:
    """An outcome as JSON."""
    return {
        "trial": outcome.trial.number,
        "hyperparameters": dict(outcome.trial.hyperparameters),
        "loss": outcome.loss,
        "metric": outcome.metric,
        "steps": outcome.steps,
        "stopped": outcome.stopped,
        "copies": [
            {"step": each.step, "source": each.source, "hyperparameters": dict(each.hyperparameters)}
            for each in outcome.copies
        ],
    }


def _outcome(fields: Fields) -> Outcome:
    trial = Trial(fields["trial"], fields["hyperparameters"])
    copies = tuple(Copy(**each) for each in fields["copies"])
    return Outcome(trial, fields["loss"], fields["metric"], fields["steps"], fields["stopped"], copies)
