"""Arrays worked out once and kept in the user's cache folder."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def cache_folder() -> Path:
    """THINWIRE_CACHE, or `thinwire` in the folder that the system keeps for caches."""
    if named := os.environ.get("THINWIRE_CACHE"):
        return Path(named)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "thinwire" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "thinwire"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"


def cached(name: str, make: Callable[[], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """The array of this name, mapped from its file, made and written first if it is not there.

    Where the folder cannot be written, the array is made anew each time.

    Args:
        name: must change whenever what `make` returns would.
        make: works the array out.
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
