"""Start the workers of a run on this machine, listen to them, and see to their end."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from thinwire import errors
from thinwire.emulate import Network, Stopping, Stream, Workers, parse_links, parse_stops, straggler_environment
from thinwire.errors import PeerLostError, ThinwireError
from thinwire.runs.folder import Fields, RunFolder
from thinwire.runs.recipes import parse_recipe
from thinwire.runs.settings import Settings
from thinwire.strategies.base import Strategy

Listener = Callable[[Fields], None]
_KEPT_LINES = 200
_GRACE_SECONDS = 5.0


def unheard(_: Fields) -> None:
    """Listen to nothing."""


def launch(settings: Settings, folder: Path, *, listener: Listener = unheard, resume: bool = False) -> Fields:
    """Run all workers of one training run here and return its summary.

    Nothing is left running: not when a worker dies, not when this process is interrupted or killed.

    Args:
        settings: as `resolve` made them.
        folder: a new one, or with `resume` that of the run to go on with.
        listener: told of steps and evaluations as they happen.
        resume: go on from the newest checkpoint in the folder.

    Raises:
        ConfigError: the folder holds a run already or cannot be made, or the machine cannot emulate the links.
        ThinwireError: what ended the run, once, whatever number of workers it ended.
    """
    home = RunFolder(folder)
    if not resume:
        home.create()
    home.write_settings(settings)
    heard = Heard(listener)
    with ExitStack() as contexts:
        network = Network(parse_links(settings.link, settings.workers)) if settings.link is not None else None
        if network is not None:
            contexts.enter_context(network)
        workers = contexts.enter_context(
            Workers(
                [sys.executable, "-m", "thinwire.runs", str(folder.absolute()), *(["--resume"] if resume else [])],
                settings.workers,
                network=network,
                environment=_environment(settings),
                on_line=heard.line,
                grace_seconds=_GRACE_SECONDS,
            )
        )
        stops = parse_stops(settings.stop, workers=settings.workers)
        heard.stopping = contexts.enter_context(Stopping(stops, workers.pids))
        workers.wait()
    summary = home.summary()
    if workers.failure is None and summary is not None:
        return summary
    raise explained(workers, heard, home)


def _environment(settings: Settings) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": str(settings.threads)}
    return {**own, **straggler_environment(settings.slow, settings.stall, seed=settings.seed)}


class Heard:
    """What the workers have said: events for the listener, and what may explain an end.

    Attributes:
        step: steps done when rank 0 last spoke of them.
        errors: the error that each rank told of, by rank.
        said: the last lines of each rank that are no events.
        stopping: what begins with the training.
    """

    def __init__(self, listener: Listener) -> None:
        self.step = 0
        self.errors: dict[int, Fields] = {}
        self.said: dict[int, deque[str]] = {}
        self.stopping: Stopping | None = None
        self._listener = listener

    def line(self, rank: int, stream: Stream, line: str) -> None:
        """Take in one line."""
        event = _event(line) if stream == "stdout" else None
        if event is None:
            self.said.setdefault(rank, deque(maxlen=_KEPT_LINES)).append(line)
        elif event["event"] == "error":
            self.errors.setdefault(rank, event)
        else:
            self.step = max(self.step, int(event.get("step", 0)))
            if self.stopping is not None and event["event"] == "step":
                self.stopping.begin()
            self._listener(event)


def _event(line: str) -> Fields | None:
    try:
        content: Any = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) and "event" in content else None


def explained(workers: Workers, heard: Heard, home: RunFolder) -> ThinwireError:
    """The one error that stands for how all the workers ended."""
    failure = workers.failure
    causes = [error for _, error in sorted(heard.errors.items()) if error["kind"] not in ("PeerLostError", "CommError")]
    lost = [error for _, error in sorted(heard.errors.items()) if error not in causes]
    killed = failure is not None and failure.signal is not None
    if killed and failure is not None:
        told = f"; {lost[0]['message']}" if lost else ""
        return PeerLostError(f"{failure} after step {heard.step}{told}{_how_to_go_on(home)}")
    if causes:
        return _as_error(causes[0])
    crashed = next((rank for rank in heard.said if rank not in heard.errors and _traceback(heard.said[rank])), None)
    if crashed is not None:
        return _crash(crashed, heard, home)
    if lost:
        return _as_error(lost[0])
    return ThinwireError(f"{failure or 'the workers'} ended without a summary after step {heard.step}")


def _as_error(event: Fields) -> ThinwireError:
    kind = getattr(errors, event["kind"], ThinwireError)
    error: ThinwireError = kind(event["message"])
    return error


def _traceback(lines: deque[str]) -> bool:
    return any(line.startswith("Traceback") for line in lines)


def _crash(rank: int, heard: Heard, home: RunFolder) -> ThinwireError:
    path = home.path / f"worker-{rank}.log"
    path.write_text("\n".join(heard.said[rank]) + "\n", encoding="utf-8")
    last = next((line for line in reversed(heard.said[rank]) if line.strip()), "")
    return ThinwireError(f"worker {rank} failed after step {heard.step}: {last[:300]}; all it said is in {path}")


def _how_to_go_on(home: RunFolder) -> str:
    """A word on checkpoints; none for yardsticks, which are not saved."""
    if home.checkpoints.is_dir() and any(home.checkpoints.iterdir()):
        return f". Go on from its last checkpoint with --resume {home.path}"
    saved = isinstance(parse_recipe(home.settings().strategy), Strategy)
    return ". Use --save-every to be able to go on from where a run was lost" if saved else ""
