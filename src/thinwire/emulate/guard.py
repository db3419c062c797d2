"""A script of its own, run by path without the package: end what a launcher leaves behind when it is killed.

It is told over its standard input which process groups exist, one `+GROUP` or `-GROUP` per line. When the input ends,
the launcher is gone, and the groups that are left are killed. `Guard` is the launcher's end of that pipe.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self


class Guard:
    """A context in which process groups can be put under guard.

    The guard is in a session of its own, so that what ends the launcher's group or terminal does not end it too.
    """

    def __enter__(self) -> Self:
        """Start the guard."""
        self._groups: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the guard kill what is still under it, and end."""
        if not self._groups:
            self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()

    def watch(self, group: int) -> None:
        """Have a process group killed when this process is gone."""
        self._groups.add(group)
        self._write(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Leave a group alone from now on: it has ended, and its number may go to another."""
        self._groups.discard(group)
        self._write(f"-{group}\n")

    def _write(self, text: str) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with suppress(BrokenPipeError):
                os.write(pipe.fileno(), text.encode())


def main() -> None:
    """Listen until the launcher is gone, then kill the groups that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
