# SPDX-License-Identifier: Apache-2.0
"""Arrays that are computed once and kept in the user's cache folder."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinwire.core.kernels.native import cache_folder
from thinwire.core.storage.files import make_folder_of, write_atomically


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
    array, content = make(), io.BytesIO()
    np.save(content, array, allow_pickle=False)
    try:
        make_folder_of(path)
        write_atomically(path, content.getvalue())
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
