"""Start workers on this machine, pass on what they say, and see each of them to its end."""

import math
import selectors
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from thinwire.emulate.guard import Guard
from thinwire.emulate.kept_signals import KeptSignals
from thinwire.emulate.namespaces import entrance
from thinwire.emulate.network import Network
from thinwire.emulate.rendezvous import meeting_place, worker_environment
from thinwire.emulate.worker import Lines, OnLine, Stream, Worker, WorkerExit
from thinwire.errors import CommTimeoutError, ConfigError

TICK_SECONDS = 0.1
TERMINATE_SECONDS = 2.0
LAST_LINES_SECONDS = 1.0
NAMELESS = "The hostname of the client socket cannot be retrieved"


def ignore_line(rank: int, stream: Stream, line: str) -> None:
    """Drop what a worker says."""


class Workers:
    """A context in which the workers of one job run.

    Each worker is started like `torchrun` would (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, with one thread unless OMP_NUM_THREADS says otherwise) and leads a process group of its own. When
    one fails, the others have ``grace_seconds`` to end by themselves; then they are told to by SIGTERM, two seconds
    later by SIGKILL. SIGINT, SIGTERM and SIGHUP are passed on to the workers, with the same patience; a second one
    kills them, and leaving the context raises `KeyboardInterrupt` or `SystemExit`. Workers do not outlive this
    process, even when it is killed, nor the thread that started them.

    All of that happens while `poll` or `wait` is called: call them often enough. Lines are handed over in them too.

    Args:
        command: the program and its arguments, the same for all.
        workers: how many.
        network: where they run, a namespace each; None leaves them in this process's own network.
        environment: variables that win over the inherited and the chosen ones.
        on_line: called with the rank, `stdout` or `stderr`, and each line.
        grace_seconds: how long the others may take to end by themselves once a worker has failed.
        timeout: how long the whole may take before it is stopped.

    Raises:
        ConfigError: when there is no command or no such program, or the network has another number of workers.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        *,
        network: Network | None = None,
        environment: Mapping[str, str] | None = None,
        on_line: OnLine = ignore_line,
        grace_seconds: float = 5.0,
        timeout: float | None = None,
    ) -> None:
        _check(command, workers, network)
        self.workers = workers
        self.failure: WorkerExit | None = None
        self.deadline_passed = False
        self._command = list(command)
        self._network = network
        self._environment = dict(environment or {})
        self._on_line = on_line if network is None else _without_name_warnings(on_line)
        self._grace_seconds = grace_seconds
        self._deadline_seconds = timeout
        self._all: list[Worker] = []
        self._running: list[Worker] = []
        self._stop_at = math.inf
        self._due: list[tuple[float, int]] = []
        self._selector = selectors.DefaultSelector()
        self._signals = KeptSignals()
        self._heard = 0
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Start all workers."""
        self._contexts.enter_context(self._signals)
        self._contexts.callback(self._selector.close)
        self._guard = self._contexts.enter_context(Guard())
        self._started = time.monotonic()
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs, and raise what a signal asked for."""
        self._close()
        if self._signals.received and error is None:
            number = self._signals.received[0]
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each worker, by rank."""
        return tuple(worker.pid for worker in self._all)

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have not ended, or whose last lines are still to come."""
        return tuple(worker.rank for worker in self._running)

    @property
    def exits(self) -> list[WorkerExit]:
        """How the workers that have ended did so, by rank."""
        return [worker.exit for worker in self._all if worker.exit is not None]

    def poll(self, seconds: float = 0.0) -> bool:
        """Hand over lines and see to the workers for so many seconds, less when all end; True while any runs."""
        until = time.monotonic() + seconds
        while self._running:
            left = until - time.monotonic()
            self._heed_signals()
            self._pass_on(max(0.0, min(TICK_SECONDS, left)))
            self._note_ends()
            self._send_what_is_due()
            if left <= 0:
                break
        return bool(self._running)

    def wait(self) -> list[WorkerExit]:
        """Poll until all have ended; returns how, by rank.

        Raises:
            CommTimeoutError: when the deadline passed and workers had to be stopped.
        """
        while self.poll(1.0):
            pass
        if self.deadline_passed:
            late = ", ".join(str(record.rank) for record in self.exits if record.stopped)
            asked = f"timeout={self._deadline_seconds:g}"
            raise CommTimeoutError(f"{asked}: workers {late} had not ended by then and were stopped; allow more")
        return self.exits

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Send SIGTERM after the grace and SIGKILL two seconds later, unless that is to happen sooner anyway."""
        first = time.monotonic() + grace_seconds
        if first < self._stop_at:
            self._stop_at = first
            self._due = [(first, signal.SIGTERM), (first + TERMINATE_SECONDS, signal.SIGKILL)]

    def signal(self, number: int) -> None:
        """Send a signal to all workers that run."""
        for worker in self._running:
            worker.signal(number)

    def _start(self) -> None:
        own = {**meeting_place(self._network), **self._environment}
        for rank in range(self.workers):
            user, net = (None, None) if self._network is None else self._network.descriptors(rank)
            worker = Worker(
                rank,
                [*entrance(user, net), *self._command],
                environment=worker_environment(rank, self.workers, own),
                descriptors=[held for held in (user, net) if held is not None],
                on_line=self._on_line,
            )
            self._guard.watch(worker.pid)
            self._all.append(worker)
            self._running.append(worker)
            for output in worker.outputs:
                self._selector.register(output.file, selectors.EVENT_READ, output)

    def _heed_signals(self) -> None:
        for number in self._signals.received[self._heard :]:
            if self._heard:
                self.signal(signal.SIGKILL)
            else:
                self.signal(number)
                self.stop(self._grace_seconds)
            self._heard += 1

    def _pass_on(self, seconds: float) -> None:
        if not self._selector.get_map():
            time.sleep(seconds)
        for key, _ in self._selector.select(seconds):
            if not key.data.read():
                self._forget(key.data)

    def _forget(self, output: Lines) -> None:
        if not output.file.closed:
            self._selector.unregister(output.file)
            output.close()

    def _note_ends(self) -> None:
        failed = [record for record in self._reap() if record.failed and not record.stopped]
        # Seen at the same moment, the one that was killed explains the ones that lost it.
        failed.sort(key=lambda record: record.signal is None)
        if failed and self.failure is None:
            self.failure = failed[0]
            self.stop(self._grace_seconds)
        self._running = [worker for worker in self._running if not self._is_done(worker)]

    def _reap(self) -> list[WorkerExit]:
        """How the workers ended that have done so since this was last asked."""
        ended = [worker for worker in self._all if worker.exit is None and worker.has_ended()]
        for worker in ended:
            self._guard.forget(worker.pid)
        return [worker.exit for worker in ended if worker.exit is not None]

    def _is_done(self, worker: Worker) -> bool:
        """Whether a worker has ended and its outputs too; a stranger that holds them open is not waited for."""
        if worker.exit is None:
            return False
        late = time.monotonic() > worker.ended + LAST_LINES_SECONDS
        if late:
            for output in worker.outputs:
                self._forget(output)
        return late or all(output.file.closed for output in worker.outputs)

    def _send_what_is_due(self) -> None:
        now = time.monotonic()
        if self._deadline_seconds is not None and now > self._started + self._deadline_seconds:
            self.deadline_passed = self.deadline_passed or bool(self._running)
            self.stop()
        while self._due and self._due[0][0] <= now:
            self.signal(self._due.pop(0)[1])

    def _close(self) -> None:
        for number, seconds in ((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, 10.0)):
            until = time.monotonic() + seconds
            self._reap()
            for worker in self._all:
                worker.signal(number)
            while len(self.exits) < len(self._all) and time.monotonic() < until:
                time.sleep(0.01)
                self._reap()
        for worker in self._all:
            for output in worker.outputs:
                self._forget(output)
        self._running = []
        self._contexts.close()


def run_workers(
    command: Sequence[str],
    workers: int,
    *,
    network: Network | None = None,
    environment: Mapping[str, str] | None = None,
    on_line: OnLine = ignore_line,
    grace_seconds: float = 5.0,
    timeout: float | None = None,
) -> list[WorkerExit]:
    """Run workers to their end; the arguments are those of `Workers`.

    Returns:
        How each worker ended, by rank. Whether one failed is for the caller to see.

    Raises:
        ConfigError: when the arguments cannot work.
        CommTimeoutError: when the deadline passed and workers had to be stopped.
    """
    with Workers(
        command,
        workers,
        network=network,
        environment=environment,
        on_line=on_line,
        grace_seconds=grace_seconds,
        timeout=timeout,
    ) as job:
        return job.wait()


def _without_name_warnings(on_line: OnLine) -> OnLine:
    """Drop torch's warning that peers have no names: in an emulated network nobody has one."""

    def filtered(rank: int, stream: Stream, line: str) -> None:
        if NAMELESS not in line:
            on_line(rank, stream, line)

    return filtered


def _check(command: Sequence[str], workers: int, network: Network | None) -> None:
    if workers < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    if network is not None and network.workers != workers:
        raise ConfigError(f"workers={workers}: the network has {network.workers} links; give one for each worker")
    if not command:
        raise ConfigError("there is no command to run; give one, such as python train.py")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"command {command[0]!r}: there is no such program in PATH; check its name")
