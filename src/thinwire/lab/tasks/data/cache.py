# SPDX-License-Identifier: Apache-2.0
"""Arrays that are computed once and kept in the user's cache folder."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def cache_folder() -> Path:
    """The folder that THINWIRE_CACHE names, or `thinwire` in the system's folder for caches."""
    if named := os.environ.get("THINWIRE_CACHE"):
        return Path(named)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "thinwire" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "thinwire"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"


def cached(name: str, make: Callable[[], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """The array of this name, memory-mapped from its file, which is written first if it does not exist.

    If the folder cannot be written to, the array is computed each time.

    Args:
        name: of the file; must change whenever the result of `make` would.
        make: computes the array.
    """
    path = cache_folder() / f"{name}.npy"
    found = _mapped(path)
    if found is not None:
        return found
    array = make()
    try:
        _write(path, array)
    except OSError:
        return array
    # The mapped file instead of the array, so that several workers share its memory.
    written = _mapped(path)
    return array if written is None else written


def _mapped(path: Path) -> NDArray[np.uint8] | None:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None


def _write(path: Path, array: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
