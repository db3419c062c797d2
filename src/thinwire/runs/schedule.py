"""When the workers of a run meet, to share what they noted, to evaluate, to save and to stop.

Between meetings nothing is said but what the strategy says. Whatever is decided here follows from figures that all
ranks hold alike, so all decide the same, and no vote is taken.
"""

from __future__ import annotations

from thinwire.runs.settings import Settings

_EVALUATION_SECONDS = 5.0
_SHARE_SECONDS = 20.0
_TARGET_SECONDS = 2.0
_TARGET_SHARE = 0.05


class Agenda:
    """The meetings of one run.

    Args:
        settings: of the run.
        step: steps done at the start.
        seconds: training time spent at the start.
    """

    def __init__(self, settings: Settings, step: int, seconds: float) -> None:
        self._settings = settings
        self._first = step
        self._began = seconds
        self._evaluation_seconds = seconds + self._evaluation_interval(seconds)

    def next_meeting(self, step: int, seconds: float) -> int:
        """The step at whose end the workers meet next."""
        settings = self._settings
        candidates = [_next_multiple(step, every) for every in (settings.eval_every, settings.save_every) if every]
        candidates += [settings.steps] if settings.steps is not None else []
        if self._goes_by_the_clock:
            candidates.append(2 * (step - self._first) + 1 + self._first)
            if step > self._first:
                candidates += [step + self._steps_in(left, step, seconds) for left in self._waits(seconds)]
        return max(step + 1, min(candidates))

    @property
    def _goes_by_the_clock(self) -> bool:
        """Whether anything depends on the time that steps take; each meeting costs who has messages in flight."""
        settings = self._settings
        return settings.steps is None or settings.eval_every is None or settings.seconds is not None

    def evaluation_is_due(self, step: int, seconds: float) -> bool:
        """Whether this meeting evaluates."""
        if self._settings.eval_every is not None:
            return step % self._settings.eval_every == 0
        if seconds + 0.5 * self._pace(step, seconds) < self._evaluation_seconds:
            return False
        self._evaluation_seconds = seconds + self._evaluation_interval(seconds)
        return True

    def save_is_due(self, step: int) -> bool:
        """Whether this meeting saves."""
        every = self._settings.save_every
        return every is not None and (step % every == 0 or step == self._settings.steps)

    def is_over(self, step: int, seconds: float) -> bool:
        """Whether the steps or the seconds are used up, as nearly as whole steps allow."""
        settings = self._settings
        if settings.steps is not None and step >= settings.steps:
            return True
        return settings.seconds is not None and seconds + 0.5 * self._pace(step, seconds) >= settings.seconds

    def _waits(self, seconds: float) -> list[float]:
        """Seconds of training until something is to be done that goes by the clock."""
        waits = [_SHARE_SECONDS]
        if self._settings.eval_every is None:
            waits.append(self._evaluation_seconds - seconds)
        if self._settings.seconds is not None:
            waits.append(self._settings.seconds - seconds)
        return waits

    def _steps_in(self, left: float, step: int, seconds: float) -> int:
        steps = left / max(self._pace(step, seconds), 1e-9)
        # A long way off the pace may still change: go most of the way, then look again.
        return round(steps) if steps < 5 else int(0.8 * steps)

    def _pace(self, step: int, seconds: float) -> float:
        return (seconds - self._began) / max(1, step - self._first)

    def _evaluation_interval(self, seconds: float) -> float:
        if self._settings.target_loss is not None:
            return _TARGET_SECONDS + _TARGET_SHARE * seconds
        return (self._settings.seconds or 10 * _EVALUATION_SECONDS) / 10


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every
