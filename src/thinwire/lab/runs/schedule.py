# SPDX-License-Identifier: Apache-2.0
"""The steps at which the workers of a run synchronise: to share figures, to evaluate, to save and to stop.

Between them only the strategy sends messages. Everything here follows from figures that are equal on all ranks, so all
ranks decide the same without a vote.
"""

from __future__ import annotations

import math

from thinwire.lab.runs.recipes import parse_recipe
from thinwire.lab.runs.settings import Settings
from thinwire.lab.runs.switches import parse_switches
from thinwire.methods.strategies.base import Strategy

_EVALUATION_SECONDS = 5.0
_SHARE_SECONDS = 20.0
_TARGET_SECONDS = 2.0
_TARGET_SHARE = 0.05


class SyncSchedule:
    """The synchronisation points of one run.

    Args:
        settings: of the run.
        step: steps done at the start.
        seconds: training time spent at the start.
    """

    def __init__(self, settings: Settings, step: int, seconds: float) -> None:
        self._settings = settings
        self._first_step = step
        self._first_seconds = seconds
        self._evaluation_seconds = seconds + self._evaluation_interval(seconds)
        # Of all strategies of the run, so that a switch finds the workers together.
        recipe = parse_recipe(settings.strategy, imports=False)
        self._switches = parse_switches(settings.switch, imports=False)
        strategies = [each for each in (recipe, *self._switches.values()) if isinstance(each, Strategy)]
        self._meets_every = math.lcm(*(each.traits.meets_every for each in strategies))
        self._eval_every, self._save_every = self._met(settings.eval_every), self._met(settings.save_every)

    def _met(self, every: int | None) -> int | None:
        """The next number of steps after which all workers are at the same one."""
        return None if every is None else -(-every // self._meets_every) * self._meets_every

    def next_sync(self, step: int, seconds: float) -> int:
        """The step after which the workers synchronise next."""
        settings = self._settings
        candidates = [(step // every + 1) * every for every in (self._eval_every, self._save_every) if every]
        candidates += [settings.steps] if settings.steps is not None else []
        candidates += [at for at in self._switches if at > step]
        # Only where something depends on the time that steps take: a synchronisation costs strategies that keep
        # messages in flight their overlap.
        if settings.steps is None or settings.eval_every is None or settings.seconds is not None:
            # After 1, 3, 7, 15, ... steps: the pace is not known yet, and the first steps are slow.
            candidates.append(2 * (step - self._first_step) + 1 + self._first_step)
            if step > self._first_step:
                waits = [_SHARE_SECONDS]
                if settings.eval_every is None:
                    waits.append(self._evaluation_seconds - seconds)
                if settings.seconds is not None:
                    waits.append(settings.seconds - seconds)
                for wait in waits:
                    steps = wait / max(self._pace(step, seconds), 1e-9)
                    # Far off the pace may still change: go most of the way, then look again.
                    candidates.append(step + (round(steps) if steps < 5 else int(0.8 * steps)))
        return self._met(max(step + 1, min(candidates))) or 0

    def evaluation_is_due(self, step: int, seconds: float) -> bool:
        """Whether to evaluate at this synchronisation."""
        if self._eval_every is not None:
            return step % self._eval_every == 0
        if seconds + 0.5 * self._pace(step, seconds) < self._evaluation_seconds:
            return False
        self._evaluation_seconds = seconds + self._evaluation_interval(seconds)
        return True

    def save_is_due(self, step: int) -> bool:
        """Whether to save at this synchronisation."""
        every, last = self._save_every, self._settings.steps
        return every is not None and (step % every == 0 or (last is not None and step >= last))

    def takes_over(self, step: int) -> Strategy | None:
        """Return the strategy that replaces the current one after this step; None if none does."""
        return self._switches.get(step)

    def is_over(self, step: int, seconds: float) -> bool:
        """Whether the steps or the seconds are used up, to the nearest whole step."""
        settings = self._settings
        if settings.steps is not None and step >= settings.steps:
            return True
        return settings.seconds is not None and seconds + 0.5 * self._pace(step, seconds) >= settings.seconds

    def _pace(self, step: int, seconds: float) -> float:
        """Seconds per step so far."""
        return (seconds - self._first_seconds) / max(1, step - self._first_step)

    def _evaluation_interval(self, seconds: float) -> float:
        # With a target, the time to reach it is known to one interval only; more often would cost too much.
        if self._settings.target_loss is not None:
            return _TARGET_SECONDS + _TARGET_SHARE * seconds
        return (self._settings.seconds or 10 * _EVALUATION_SECONDS) / 10
