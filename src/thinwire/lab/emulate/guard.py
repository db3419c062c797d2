# SPDX-License-Identifier: Apache-2.0
"""A script, run by path without the package: kill the process groups that a launcher leaves behind when it is killed.

Its standard input lists the process groups that exist, as one `+GROUP` or `-GROUP` per line. When the input ends, the
launcher is gone, and the groups that are left are killed. `Guard` is the launcher's end of that pipe.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Self


class Guard:
    """A context in which process groups are killed if this process dies.

    The guard process is in a session of its own, so that a signal to the launcher's group or terminal does not end it
    too.
    """

    def __enter__(self) -> Self:
        """Start the guard process."""
        self._groups: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Let the guard process kill the groups that are left, and end."""
        if not self._groups:
            # It has nothing to do, and need not be waited for until it has started.
            self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()

    def watch(self, group: int) -> None:
        """Kill this process group when this process is gone."""
        self._groups.add(group)
        self._write(f"+{group}\n")

    def unwatch(self, group: int) -> None:
        """Do not kill this group: it has ended, and the kernel may give its number to another one."""
        self._groups.discard(group)
        self._write(f"-{group}\n")

    def _write(self, text: str) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with suppress(BrokenPipeError):
                os.write(pipe.fileno(), text.encode())


def main() -> None:
    """Read groups until the launcher is gone, then kill those that are left."""
    # Only the end of the input ends it: it must outlive the launcher, even if both are asked to stop.
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
