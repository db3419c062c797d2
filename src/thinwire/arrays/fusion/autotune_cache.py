# SPDX-License-Identifier: Apache-2.0
"""Keep the results of autotuning on disk, beside the compiled kernels, for later processes."""

from __future__ import annotations

import atexit
import json
import os
from contextlib import suppress
from pathlib import Path

from thinwire.core.kernels.native import machine_path
from thinwire.core.storage.files import write_atomically

_MAX_ENTRIES = 4096


class AutotuneCache:
    """The name of the fastest implementation for each case; read at first use and written when the process ends.

    One file serves one machine, one version of torch and one of thinwire. A file that cannot be read or written is
    ignored: the cache only saves time.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] | None = None
        self._process = os.getpid()
        self._new: dict[str, str] = {}

    def get(self, case: str) -> str | None:
        """Return the implementation that was fastest, or None if the file has no such case."""
        if self._known is None:
            self._known = _read(cache_path())
        return self._known.get(case)

    def put(self, case: str, name: str) -> None:
        """Add a measurement."""
        if not self._new:
            atexit.register(self.write)
            self._process = os.getpid()
        self._new[case] = name

    def clear(self) -> None:
        """Ignore the file from now on, and do not write what was measured so far."""
        self._known = {}
        self._new = {}
        atexit.unregister(self.write)

    def write(self) -> None:
        """Add the new measurements to the file, and drop the oldest beyond the limit."""
        path, new = cache_path(), self._new
        if not new or os.getpid() != self._process:  # a fork leaves the writing to its parent
            return
        # Read again: other processes may have written since this one started.
        kept = {case: name for case, name in _read(path).items() if case not in new}
        entries = list({**kept, **new}.items())[-_MAX_ENTRIES:]
        self._new = {}
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(dict(entries), indent=0).encode())


def cache_path() -> Path:
    """Return the path of the file for this machine and these versions."""
    return machine_path("fusion", "autotune")


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(case): str(name) for case, name in found.items()} if isinstance(found, dict) else {}
