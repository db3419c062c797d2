# SPDX-License-Identifier: Apache-2.0
"""Start the workers of a run on this machine, read their output, and explain how they ended."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from thinwire.core.torch_internals import OPTIMIZER_IMPORTS
from thinwire.elastic.notice import SIGNALS
from thinwire.errors import ConfigError, PeerLostError, ThinwireError, error_named
from thinwire.lab.emulate import Network, Stream, WorkerExit, Workers, parse_links, straggler_environment
from thinwire.lab.emulate.launch import never
from thinwire.lab.runs.elastic_record import ElasticRecord, hosted_store
from thinwire.lab.runs.folder import Fields, RunFolder
from thinwire.lab.runs.own_functions import modules_of_functions
from thinwire.lab.runs.recipes import modules_of, parse_recipe
from thinwire.lab.runs.settings import Settings
from thinwire.lab.runs.switches import parse_switches
from thinwire.methods.strategies.base import Strategy

Listener = Callable[[Fields], None]
_KEPT_LINES = 200
_PRELOADED = (*OPTIMIZER_IMPORTS, "thinwire.lab.runs.worker")
_GRACE_SECONDS = 5.0
_FIRST_RESTART_SECONDS = 1.0
_LONGEST_RESTART_SECONDS = 30.0
_USERS_ERROR = 2


def ignore_event(_: Fields) -> None:
    """Ignore an event."""


def launch(settings: Settings, folder: Path, *, listener: Listener = ignore_event, resume: bool = False) -> Fields:
    """Run all workers of one training run here and return its summary.

    No worker is left running, also when one dies or this process is interrupted or killed. Workers are forks of a
    process that has imported torch, which stays for the next run and ends with this process; where CUDA is used, and on
    other systems than Linux, each is a process of its own.

    Args:
        settings: as `resolve` made them.
        folder: a new one, or with `resume` that of the run to continue.
        listener: called with each step and evaluation as they happen.
        resume: continue from the newest checkpoint in the folder.

    Raises:
        ConfigError: the folder holds a run already or cannot be created, or the machine cannot emulate the links.
        ThinwireError: what ended the run; one error, however many workers it ended. A run that has saved with notice
            has not failed: its summary says `notice`.
    """
    if settings.elastic and settings.late is None and resume:
        raise ConfigError(f"--resume {folder}: an elastic run saves no checkpoints. Start it again in another folder")
    home = RunFolder(folder)
    recipes = [parse_recipe(settings.strategy, imports=False), *parse_switches(settings.switch, imports=False).values()]
    modules = sorted({module for recipe in recipes for module in modules_of(recipe)}) + modules_of_functions(settings)
    if not resume:
        home.create()
    home.write_settings(settings)
    record = ElasticRecord(home, settings, listener, resume=resume) if settings.elastic else None
    output = WorkerOutput(listener if record is None else record.add)
    environment = {
        "OMP_NUM_THREADS": str(settings.threads),
        **straggler_environment(settings.slow, settings.stall, seed=settings.seed),
    }
    if modules:
        # The workers look for them where this process found them, which may be the folder of its own program.
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
    options = ["--resume"] * resume + modules
    with ExitStack() as contexts:
        network = Network(parse_links(settings.link, settings.workers)) if settings.link is not None else None
        if record is not None:
            environment |= contexts.enter_context(hosted_store(settings.workers))
        if network is not None:
            contexts.enter_context(network)
        workers = contexts.enter_context(
            Workers(
                [sys.executable, "-m", "thinwire.lab.runs", str(folder.absolute()), *options],
                settings.workers,
                network=network,
                environment=environment,
                on_line=output.add_line,
                grace_seconds=_GRACE_SECONDS,
                timeout=None,  # a run may take weeks, and each of its workers' waits has a timeout
                survives=settings.elastic,
                # One worker's notice is sent to that worker; this process's own is that of the whole machine.
                notices=SIGNALS if settings.on_notice == "save" else (),
                restart=never if record is None else _restarts(settings, record),
                preload=_PRELOADED,
            )
        )
        workers.wait()
    if record is not None and record.ended:
        return record.finish()
    if record is not None and record.left and workers.failure is None:
        raise PeerLostError(f"all workers have left with notice by step {output.step}. Start the run again")
    summary = home.summary()
    if workers.failure is None and summary is not None:
        return summary
    raise failure_of(workers, output, home)


def _restarts(settings: Settings, record: ElasticRecord) -> Restarts:
    return Restarts(settings.restarts or 0, over=lambda: record.ended > 0, tell=record.add_restart)


class Restarts:
    """Decides about each worker that has failed; a worker that fails again and again waits twice as long each time.

    One that the user's mistake has ended is left, since it would end again.

    Args:
        limit: of all workers together.
        over: whether the run has reached its end.
        tell: called with an event for each decision.

    Example:
        >>> told = []
        >>> restarts = Restarts(3, over=lambda: False, tell=told.append)
        >>> killed = WorkerExit(1, code=None, signal=9, seconds=60.0, cpu_seconds=1.0)
        >>> [restarts(killed) for _ in range(4)]
        [1.0, 2.0, 4.0, None]
        >>> told[-1]["how"], told[-1]["after"]
        ('worker 1 was ended by SIGKILL', None)
    """

    def __init__(self, limit: int, *, over: Callable[[], bool], tell: Callable[[Fields], None]) -> None:
        self._limit = self._left = limit
        self._over, self._tell = over, tell
        self._counts: Counter[int] = Counter()

    def __call__(self, record: WorkerExit) -> float | None:
        """Return in how many seconds a worker is started again; None for one that is not."""
        if self._over() or record.code == _USERS_ERROR or not self._limit:
            return None
        after = None
        if self._left:
            self._left -= 1
            after = min(_LONGEST_RESTART_SECONDS, _FIRST_RESTART_SECONDS * 2 ** self._counts[record.rank])
            self._counts[record.rank] += 1
        event = {"event": "restart", "rank": record.rank, "how": str(record), "after": after, "left": self._left}
        self._tell(event)
        return after


class WorkerOutput:
    """Reads the workers' output: passes events on, and keeps what may explain a failure.

    Attributes:
        step: steps done at rank 0's last event.
        errors: the error event of each rank that sent one.
        lines: the last lines of each rank that are not events.
    """

    def __init__(self, listener: Listener) -> None:
        self.step = 0
        self.errors: dict[int, Fields] = {}
        self.lines: dict[int, deque[str]] = {}
        self._listener = listener

    def add_line(self, rank: int, stream: Stream, line: str) -> None:
        """Read one line of a rank's output."""
        event = _event(line) if stream == "stdout" else None
        if event is None:
            self.lines.setdefault(rank, deque(maxlen=_KEPT_LINES)).append(line)
        elif event["event"] == "error":
            self.errors.setdefault(rank, event)
        else:
            self.step = max(self.step, int(event.get("step", 0)))
            self._listener(event)


def _event(line: str) -> Fields | None:
    try:
        content: Any = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) and "event" in content else None


def failure_of(workers: Workers, output: WorkerOutput, home: RunFolder) -> ThinwireError:
    """Return the one error that explains how all the workers ended: its cause, not what it caused on other ranks."""
    failure = workers.failure
    events = [event for _, event in sorted(output.errors.items())]
    causes = [event for event in events if event["kind"] not in ("PeerLostError", "CommError")]
    lost = [event for event in events if event not in causes]
    # A killed worker sends no event itself; the others only report that they lost it, each at a step of its own.
    if failure is not None and failure.signal is not None:
        return PeerLostError(f"{failure} after step {output.step}{_how_to_resume(home)}")
    if causes:
        return _as_error(causes[0])
    for rank, lines in output.lines.items():
        if rank not in output.errors and any(line.startswith("Traceback") for line in lines):
            path = home.path / f"worker-{rank}.log"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            last = next((line for line in reversed(lines) if line.strip()), "")
            return ThinwireError(
                f"worker {rank} failed after step {output.step}: {last[:300]}; its last output is in {path}"
            )
    if lost:
        return _as_error(lost[0])
    return ThinwireError(f"{failure or 'the workers'} ended without a summary after step {output.step}")


def _as_error(event: Fields) -> ThinwireError:
    return error_named(str(event["kind"]), str(event["message"]))


def _how_to_resume(home: RunFolder) -> str:
    """Advice on checkpoints; none for PyTorch's own methods, which cannot be saved."""
    if home.checkpoints.is_dir() and any(home.checkpoints.iterdir()):
        return f". Continue from its last checkpoint with --resume {home.path}"
    settings = home.settings()
    if settings.save_every:
        return f". It had not saved yet (--save-every {settings.save_every}), so start it again"
    saved = isinstance(parse_recipe(settings.strategy, imports=False), Strategy)
    return ". Use --save-every to be able to continue a run that fails" if saved else ""
