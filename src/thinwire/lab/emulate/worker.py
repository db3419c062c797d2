# SPDX-License-Identifier: Apache-2.0
"""One worker: a process that leads its own process group, the lines it prints, and how it ended."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Literal

Stream = Literal["stdout", "stderr"]
OnLine = Callable[[int, Stream, str], None]

LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended.

    Args:
        rank: which worker.
        code: its exit code, None when a signal ended it.
        signal: the number of that signal, or None.
        seconds: from its start to its end.
        cpu_seconds: user and system time of its process and of the children it waited for.
        stopped: whether the launcher had sent it a signal before it ended.
    """

    rank: int
    code: int | None
    signal: int | None
    seconds: float
    cpu_seconds: float
    stopped: bool = False

    @property
    def failed(self) -> bool:
        """Return True if it ended by a signal or with an exit code other than 0."""
        return self.code != 0

    @property
    def how(self) -> str:
        """The exit code, or the name of the signal, such as `SIGKILL`."""
        if self.signal is None:
            return str(self.code)
        # Real-time signals have no names.
        with suppress(ValueError):
            return signal.Signals(self.signal).name
        return f"signal {self.signal}"

    def __str__(self) -> str:
        """Such as `worker 2 was ended by SIGKILL`."""
        verb = "ended with exit code" if self.signal is None else "was ended by"
        return f"worker {self.rank} {verb} {self.how}"


class Lines:
    """One output of a worker, split into lines.

    Args:
        file: the end of the pipe to read from.
        emit: called with each line, without its end.
    """

    def __init__(self, file: IO[bytes], emit: Callable[[str], None]) -> None:
        self.file = file
        self._emit = emit
        self._rest = b""
        os.set_blocking(file.fileno(), False)

    def read(self) -> bool:
        """Emit the lines that have arrived; returns False once the pipe has ended."""
        try:
            piece = os.read(self.file.fileno(), LONGEST_LINE)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + piece).split(b"\n")
        # A line without an end, such as a progress bar, is emitted in pieces rather than kept forever.
        if len(self._rest) > LONGEST_LINE or not piece:
            lines, self._rest = [*lines, *filter(None, [self._rest])], b""
        for line in lines:
            self._emit(line.decode(errors="replace").rstrip("\r"))
        return bool(piece)

    def close(self) -> None:
        """Emit a last line without a line end, and close the pipe."""
        if self._rest:
            self._emit(self._rest.decode(errors="replace"))
            self._rest = b""
        self.file.close()


@dataclass(frozen=True)
class Started:
    """A child process that leads its own process group.

    Args:
        pid: its number.
        stdout: the end of its output to read from.
        stderr: the same of its errors.
        popen: what started it, if that was `subprocess`.
    """

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    popen: subprocess.Popen[bytes] | None = None


def start_process(command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> Started:
    """Start a process that leads its own process group.

    Args:
        command: what to run.
        environment: the whole environment.
        descriptors: open files that it inherits.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    assert process.stdout is not None and process.stderr is not None
    return Started(process.pid, process.stdout, process.stderr, process)


class Worker:
    """A started process, with the lines that it prints.

    Args:
        rank: its rank.
        started: the process, just started.
        on_line: called with each line, in the thread that reads.
    """

    def __init__(self, rank: int, started: Started, on_line: OnLine) -> None:
        self.rank = rank
        self.pid = started.pid
        self.exit: WorkerExit | None = None
        self.stop_requested = False
        self.ended = math.inf
        self._started, self._popen = time.monotonic(), started.popen
        self.outputs = [
            Lines(started.stdout, lambda line: on_line(rank, "stdout", line)),
            Lines(started.stderr, lambda line: on_line(rank, "stderr", line)),
        ]

    def signal(self, number: int, *, stops: bool = True) -> None:
        """Send a signal to the worker and the processes it has started; does nothing once it has ended.

        Args:
            number: of the signal.
            stops: whether the worker counts as stopped by it.
        """
        if self.exit is None:
            self.stop_requested = self.stop_requested or stops
            self._signal_group(number)

    def has_ended(self) -> bool:
        """Whether it has ended; when it just did, record how in `exit`, and kill the processes it leaves running."""
        if self.exit is not None:
            return True
        # Not Popen.poll, because only wait4 reports the CPU time of this one child.
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if not pid:
            return False
        self._signal_group(signal.SIGKILL)
        code = os.waitstatus_to_exitcode(status)
        # Popen must know that the process has been waited for: its number may belong to another one now.
        if self._popen is not None:
            self._popen.returncode = code
        self.ended = time.monotonic()
        how = (None, -code) if code < 0 else (code, None)
        cpu_seconds = usage.ru_utime + usage.ru_stime
        self.exit = WorkerExit(self.rank, *how, self.ended - self._started, cpu_seconds, self.stop_requested)
        return True

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
