# SPDX-License-Identifier: Apache-2.0
"""Figures that a plan times on this machine, kept on disk so that the same plan gives the same answer.

Two timings of one codec differ by a few percent, and by more on a busy machine, which is enough to turn a close choice.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from thinwire.core.kernels.native import machine_path
from thinwire.core.storage.files import make_folder_of, write_atomically

_MOST_FIGURES = 1024


class Timings:
    """Figures by name: those that were kept, and those that are measured now.

    A file that cannot be read or written is ignored: then figures are kept in memory only.

    Args:
        path: the file to read and write; None keeps figures in memory only.
        again: measure figures again that the file has.
        busy: whether other programs run, which makes figures too long. Figures that were measured so are measured again
            as soon as none run.

    Attributes:
        path: the file, or None.
        kept: how many figures came from the file.
        measured: how many figures were measured.
        oldest: when the oldest of the figures was measured, in seconds since the epoch; None before the first.
    """

    def __init__(self, path: Path | None = None, *, again: bool = False, busy: bool = False) -> None:
        self.path = path
        self._busy = busy
        self.kept = self.measured = 0
        self.oldest: float | None = None
        self._file = {} if again else _read(path)
        self._used: dict[str, Any] = {}

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return a figure, measuring it if there is none.

        Args:
            name: must change whenever the figure would, other than with the machine or a version.
            measure: returns the figure, as JSON can have it.
        """
        if name not in self._used:
            # The threads that torch may use change what a codec takes.
            place = f"{name}, {torch.get_num_threads()} threads"
            found = self._file.get(place)
            if found is None or (found.get("busy") and not self._busy):
                found = {"value": measure(), "at": time.time(), "busy": self._busy}
                self.measured += 1
                self._keep(place, found)
            else:
                self.kept += 1
            self.oldest = found["at"] if self.oldest is None else min(self.oldest, found["at"])
            self._used[name] = found["value"]
        return self._used[name]

    def _keep(self, place: str, found: dict[str, Any]) -> None:
        self._file[place] = found
        if self.path is None:
            return
        # Read again: other processes may have written since.
        rest = {name: each for name, each in _read(self.path).items() if name != place}
        entries = dict(list({**rest, place: found}.items())[-_MOST_FIGURES:])
        with suppress(OSError):
            make_folder_of(self.path)
            write_atomically(self.path, json.dumps(entries, indent=0).encode())


def timings_path() -> Path:
    """Return the path of the file for this machine and these versions."""
    return machine_path("plan", "timings")


def digest(*facts: object) -> str:
    """Return a short text that differs where the facts do."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _read(path: Path | None) -> dict[str, dict[str, Any]]:
    try:
        found = {} if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        str(name): each
        for name, each in found.items()
        if isinstance(each, dict) and "value" in each and isinstance(each.get("at"), float)
    }
