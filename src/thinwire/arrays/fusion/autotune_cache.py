# SPDX-License-Identifier: Apache-2.0
"""Keep the results of autotuning on disk, beside the compiled kernels, for later processes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from thinwire.core.kernels.native import machine_path
from thinwire.core.storage.files import write_atomically

_MAX_ENTRIES = 4096


class AutotuneCache:
    """The name of the fastest implementation for each case; read at first use, and written at each measurement.

    One file serves one machine, one version of torch and one of thinwire. A file that cannot be read or written is
    ignored: the cache only saves time.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] | None = None

    def get(self, case: str) -> str | None:
        """Return the implementation that was fastest, or None if the file has no such case."""
        if self._known is None:
            self._known = _read(cache_path())
        return self._known.get(case)

    def put(self, case: str, name: str) -> None:
        """Add a measurement to the file, and drop the oldest beyond the limit."""
        path = cache_path()
        # Read again: other processes may have written since this one started.
        kept = [entry for entry in _read(path).items() if entry[0] != case]
        entries = [*kept, (case, name)][-_MAX_ENTRIES:]
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(dict(entries), indent=0).encode())

    def clear(self) -> None:
        """Ignore what is in the file from now on."""
        self._known = {}


def cache_path() -> Path:
    """Return the path of the file for this machine and these versions."""
    return machine_path("fusion", "autotune")


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(case): str(name) for case, name in found.items()} if isinstance(found, dict) else {}
