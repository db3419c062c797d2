# SPDX-License-Identifier: Apache-2.0
"""Start workers on this machine, hand over the lines they print, and end all of them."""

import math
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Self

from thinwire.errors import CommTimeoutError, ConfigError
from thinwire.lab.emulate.fork_server import ForkServer, fork_server
from thinwire.lab.emulate.guard import Guard
from thinwire.lab.emulate.namespaces import enter_command
from thinwire.lab.emulate.network import Network
from thinwire.lab.emulate.worker import Lines, OnLine, Started, Stream, Worker, WorkerExit, start_process

POLL_SECONDS = 0.1
DAY_SECONDS = 86_400.0
# From SIGTERM to SIGKILL.
TERMINATE_SECONDS = 2.0
# A worker's child may hold its output open after it has ended; it is read for this long.
LAST_LINES_SECONDS = 1.0
# Windows has no SIGHUP.
DEFERRED = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if name in signal.Signals.__members__)
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
FIRST_PORT = 20000
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
NO_HOSTNAME = "The hostname of the client socket cannot be retrieved"


def ignore_line(rank: int, stream: Stream, line: str) -> None:
    """Do nothing with a worker's line."""


def never(_: WorkerExit) -> None:
    """Do not start a worker again."""


class DeferredSignals:
    """A context in which SIGINT, SIGTERM and SIGHUP are only recorded, in `received`.

    Only the main thread may set handlers; in any other thread this does nothing. A signal that was ignored stays
    ignored.

    Args:
        more: other signals that are recorded.
    """

    def __init__(self, more: Sequence[signal.Signals] = ()) -> None:
        self.received: list[int] = []
        self._numbers = {*DEFERRED, *more}
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Start to record signals."""
        if threading.current_thread() is threading.main_thread():
            deferred = [number for number in self._numbers if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._record) for number in deferred}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the former handlers."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


class Workers:
    """A context in which the workers of one job run.

    Each worker is started like `torchrun` would (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, with one thread unless OMP_NUM_THREADS is set) and leads a process group of its own. When
    one fails, the others have ``grace_seconds`` to end by themselves; then they get SIGTERM, and two seconds later
    SIGKILL. SIGINT, SIGTERM and SIGHUP are passed on to the workers, which then have the same time to end; a second
    signal kills them. Leaving the context raises the `KeyboardInterrupt` or `SystemExit` that the signal asked for.
    Workers do not outlive this process, even when it is killed, nor the thread that started them.

    All of that happens inside `poll` and `wait`, which also call ``on_line``: call one of them often.

    Args:
        command: the program and its arguments, the same for all.
        workers: how many.
        network: where they run, a namespace each; None leaves them in this process's own network.
        environment: variables that replace inherited ones and those that are set here.
        on_line: called with the rank, `stdout` or `stderr`, and each line.
        grace_seconds: seconds the others have to end by themselves once a worker has failed.
        timeout: seconds after which the workers are stopped; None is no limit, for workers whose own waits have one.
        survives: whether the others continue when one has failed.
        notices: signals that are passed on to the workers the first time, which end by themselves then, however long
            that takes.
        restart: with `survives`, called with the exit of a worker that has failed; returns in how many seconds it is
            started again, or None to leave it. None of them is where no other one runs.
        preload: modules that a process imports for all workers of a command `[sys.executable, "-m", MODULE, ...]`:
            they are forks of it, where that can be, and start at once. It stays for the next call with the same
            modules, and ends with this process.

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
        timeout: float | None = DAY_SECONDS,
        survives: bool = False,
        notices: Sequence[signal.Signals] = (),
        restart: Callable[[WorkerExit], float | None] = never,
        preload: Sequence[str] = (),
    ) -> None:
        _check(command, workers, network)
        self.workers = workers
        self.failure: WorkerExit | None = None
        self.timed_out = False
        self._command = list(command)
        self._network = network
        self._environment = dict(environment or {})
        self._on_line = on_line if network is None else _without_name_warnings(on_line)
        self._grace_seconds = grace_seconds
        self._timeout = timeout
        self._survives = survives
        self._notices = tuple(notices)
        self._restart = restart
        self._preload = tuple(preload)
        self._forks: ForkServer | None = None
        self._again: list[tuple[float, int]] = []
        self._all: list[Worker] = []
        self._running: list[Worker] = []
        self._stop_at = math.inf
        self._due: list[tuple[float, int]] = []
        self._selector = selectors.DefaultSelector()
        self._signals = DeferredSignals(self._notices)
        self._handled = self._ending = 0
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Start all workers."""
        # Signals first: one that arrives while workers start must not leave any of them behind.
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

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """End the workers that still run, and raise the exception that a signal asked for."""
        self._close()
        if error is None:
            self._raise_what_was_asked_for()

    def _raise_what_was_asked_for(self) -> None:
        """Raise the exception that a signal asked for, if there was one."""
        received = self._signals.received
        # A notice alone ends nothing.
        ending = received[1:] if received and received[0] in self._notices else received
        if ending:
            number = ending[0]
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each worker, by rank; the last one of a worker that was started again."""
        return tuple({worker.rank: worker.pid for worker in self._all}.values())

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have not ended, or whose last lines have not been read."""
        return tuple(worker.rank for worker in self._running)

    @property
    def exits(self) -> list[WorkerExit]:
        """Return how the workers that have ended did so, by rank; first those that were there at the start."""
        return [worker.exit for worker in self._all if worker.exit is not None]

    def poll(self, seconds: float = 0.0) -> bool:
        """Hand over lines and signals for so many seconds, or until all have ended; returns whether any still runs."""
        until = time.monotonic() + seconds
        while self._running:
            left = until - time.monotonic()
            self._forward_signals()
            self._read_outputs(max(0.0, min(POLL_SECONDS, left)))
            self._handle_exits()
            self._start_again()
            self._send_due_signals()
            if left <= 0:
                break
        return bool(self._running)

    def wait(self) -> list[WorkerExit]:
        """Poll until all have ended; returns their exits by rank.

        Raises:
            CommTimeoutError: the timeout passed and workers had to be stopped.
        """
        while self.poll(1.0):
            pass
        if self.timed_out:
            late = ", ".join(str(record.rank) for record in self.exits if record.stopped)
            raise CommTimeoutError(
                f"timeout={self._timeout:g}: workers {late} had not ended by then and were stopped. Allow more"
            )
        return self.exits

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Send SIGTERM after the grace and SIGKILL two seconds later, unless that is due sooner already."""
        first = time.monotonic() + grace_seconds
        if first < self._stop_at:
            self._stop_at = first
            self._due = [(first, signal.SIGTERM), (first + TERMINATE_SECONDS, signal.SIGKILL)]

    def signal(self, number: int) -> None:
        """Send a signal to all workers that run."""
        for worker in self._running:
            worker.signal(number)

    def _start(self) -> None:
        self._own = {**rendezvous_environment(self._network), **self._environment}
        if self._preload:
            self._forks = self._fork_server()
        for rank in range(self.workers):
            self._start_worker(rank)

    def _start_worker(self, rank: int) -> None:
        worker = Worker(rank, self._start_process(rank), self._on_line)
        self._guard.watch(worker.pid)
        self._all.append(worker)
        self._running.append(worker)
        for output in worker.outputs:
            self._selector.register(output.file, selectors.EVENT_READ, output)

    def _start_process(self, rank: int) -> Started:
        user, net = (None, None) if self._network is None else self._network.descriptors(rank)
        environment = worker_environment(rank, self.workers, self._own)
        if self._forks is not None:
            try:
                _, _, module, *arguments = self._command
                return self._forks.start(module, arguments, environment=environment, descriptors=[user, net])
            except OSError:
                self._forks = None  # from here on as without it
        held = [each for each in (user, net) if each is not None]
        return start_process([*enter_command(user, net), *self._command], environment, held)

    def _fork_server(self) -> ForkServer | None:
        """Return the process that workers are forked from, ready; None where there can be none."""
        try:
            server = fork_server(self._preload, worker_environment(0, self.workers, self._own))
            while not server.ready(POLL_SECONDS):
                self._raise_what_was_asked_for()
        except OSError:
            return None
        return server

    def _start_again(self) -> None:
        """Start the workers whose time has come; none where no other one runs, or all are being stopped."""
        if not any(worker.exit is None for worker in self._running) or self._stop_at < math.inf:
            self._again = []
        now = time.monotonic()
        due = [rank for at, rank in self._again if at <= now]
        self._again = [(at, rank) for at, rank in self._again if at > now]
        for rank in due:
            self._start_worker(rank)

    def _forward_signals(self) -> None:
        for number in self._signals.received[self._handled :]:
            if not self._handled and number in self._notices:
                for worker in self._running:
                    worker.signal(number, stops=False)
            elif self._ending:
                self.signal(signal.SIGKILL)
            else:
                self._ending = number
                self.signal(number)
                self.stop(self._grace_seconds)
            self._handled += 1

    def _read_outputs(self, seconds: float) -> None:
        if not self._selector.get_map():
            time.sleep(seconds)
        # Outputs are read without blocking, so that a worker that prints much does not delay signals.
        for key, _ in self._selector.select(seconds):
            if not key.data.read():
                self._close_output(key.data)

    def _close_output(self, output: Lines) -> None:
        if not output.file.closed:
            self._selector.unregister(output.file)
            output.close()

    def _handle_exits(self) -> None:
        failed = [record for record in self._reap() if record.failed and not record.stopped]
        # Of several seen at once, report the one that a signal killed: the others failed because they lost it.
        failed.sort(key=lambda record: record.signal is None)
        if failed and self.failure is None:
            self.failure = failed[0]
            if not self._survives:
                self.stop(self._grace_seconds)
        for record in failed if self._survives else ():
            if (seconds := self._restart(record)) is not None:
                self._again.append((time.monotonic() + seconds, record.rank))
        self._running = [worker for worker in self._running if not self._is_done(worker)]

    def _reap(self) -> list[WorkerExit]:
        """Return the exits of the workers that have ended since the last call."""
        ended = [worker for worker in self._all if worker.exit is None and worker.has_ended()]
        for worker in ended:
            self._guard.unwatch(worker.pid)
        return [worker.exit for worker in ended if worker.exit is not None]

    def _is_done(self, worker: Worker) -> bool:
        """Whether a worker and its outputs have ended; another process that holds them open is not waited for."""
        if worker.exit is None:
            return False
        late = time.monotonic() > worker.ended + LAST_LINES_SECONDS
        if late:
            for output in worker.outputs:
                self._close_output(output)
        return late or all(output.file.closed for output in worker.outputs)

    def _send_due_signals(self) -> None:
        now = time.monotonic()
        if self._timeout is not None and now > self._started + self._timeout:
            self.timed_out = self.timed_out or bool(self._running)
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
                self._close_output(output)
        self._running = []
        self._contexts.close()


def run_workers(command: Sequence[str], workers: int, **options: Any) -> list[WorkerExit]:
    """Run workers to their end; the arguments are those of `Workers`.

    Returns:
        How each worker ended, by rank. A failed worker raises nothing: look at `WorkerExit.failed`.

    Raises:
        ConfigError: when the arguments cannot work.
        CommTimeoutError: the timeout passed and workers had to be stopped.

    Example:
        >>> import sys
        >>> code = "import os; print('hello from rank', os.environ['RANK'])"
        >>> lines = []
        >>> exits = run_workers(
        ...     [sys.executable, "-I", "-S", "-c", code], 2, on_line=lambda rank, stream, line: lines.append(line)
        ... )
        >>> sorted(lines)
        ['hello from rank 0', 'hello from rank 1']
        >>> [record.code for record in exits]
        [0, 0]
    """
    with Workers(command, workers, **options) as job:
        return job.wait()


def _without_name_warnings(on_line: OnLine) -> OnLine:
    """Drop torch's warning that another rank has no host name: in an emulated network none has."""

    def filtered(rank: int, stream: Stream, line: str) -> None:
        if NO_HOSTNAME not in line:
            on_line(rank, stream, line)

    return filtered


def _check(command: Sequence[str], workers: int, network: Network | None) -> None:
    if workers < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    if not hasattr(os, "wait4"):
        raise ConfigError(
            f"workers={workers}: processes are started here on Linux and macOS, and this is {sys.platform}. Start each "
            "worker by torchrun"
        )
    if network is not None and network.workers != workers:
        raise ConfigError(f"workers={workers}: the network has {network.workers} links. Give one for each worker")
    if not command:
        raise ConfigError("there is no command to run. Give one, such as python train.py")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"command {command[0]!r}: there is no such program in PATH. Check its name")


# -- the environment of a worker --------------------------------------------------------------------------------------


def rendezvous_environment(network: Network | None) -> dict[str, str]:
    """The rendezvous address of rank 0 as environment variables: in the network, or without one on the loopback."""
    if network is not None:
        return network.environment()
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def worker_environment(rank: int, workers: int, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of one worker, made from this process's.

    Args:
        rank: which worker.
        workers: how many there are.
        own: variables that replace all others.
    """
    # With torchrun's variables a worker would look for the rendezvous of torchrun's agent.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    choices = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    return {**choices, **inherited, **{name: str(number) for name, number in ranks.items()}, **own}


def free_port() -> int:
    """Return a port of the loopback on which nothing listens.

    It lies below the range from which the kernel takes ports for outgoing connections. Rank 0 opens it only seconds
    later, and a port from that range could be taken by then.
    """
    try:
        end = int(PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        end = 32768
    for _ in range(100):
        port = FIRST_PORT + secrets.randbelow(max(1, end - FIRST_PORT))
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
