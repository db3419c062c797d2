"""Which way was fastest on this machine: kept beside the compiled kernels, from run to run."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

from thinwire._version import __version__
from thinwire.kernels.native import cache_folder
from thinwire.storage.files import write_atomically

_MOST = 4096


class Memory:
    """Names of ways by the text of a case, read when first asked for and written when the process ends.

    A file is of one machine, one version of torch and one of thinwire. What cannot be read or written is done without.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] | None = None
        self._fresh: dict[str, str] = {}

    def recall(self, case: str) -> str | None:
        """The way that was fastest, if this machine has met the case."""
        if self._known is None:
            self._known = _read(place())
        return self._known.get(case)

    def note(self, case: str, way: str) -> None:
        """Keep what was measured."""
        if not self._fresh:
            atexit.register(self.write)
        self._fresh[case] = way

    def forget(self) -> None:
        """Neither read what is kept, nor keep what was measured so far."""
        self._known = {}
        self._fresh = {}
        atexit.unregister(self.write)

    def write(self) -> None:
        """Add what was measured to what other processes have kept meanwhile; the oldest go where there are too many."""
        path, fresh = place(), self._fresh
        if not fresh:
            return
        kept = {case: way for case, way in _read(path).items() if case not in fresh}
        every = list({**kept, **fresh}.items())[-_MOST:]
        self._fresh = {}
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(dict(every), indent=0).encode())


def place() -> Path:
    """The file of this machine and these versions."""
    facts = [platform.node(), platform.machine(), str(os.cpu_count()), torch.__version__, __version__]
    return cache_folder() / "fusion" / f"ways-{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:20]}.json"


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(case): str(way) for case, way in found.items()} if isinstance(found, dict) else {}
