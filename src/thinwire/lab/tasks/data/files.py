# SPDX-License-Identifier: Apache-2.0
"""The data files: finding them in the data folder, reading their formats, and downloading them."""

import gzip
import importlib
import importlib.util
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from thinwire.core.kernels.native import cache_folder
from thinwire.core.storage.files import make_folder_of, write_atomically
from thinwire.errors import ConfigError
from thinwire.lab.tasks.data.base import Indices

Content = TypeVar("Content")
OFFER = ", or pip install 'thinwire[hub]' on a machine that is online"
_BROKEN = (OSError, EOFError, ValueError, KeyError, IndexError, zlib.error, struct.error, zipfile.BadZipFile)


@dataclass(frozen=True)
class Folder:
    """The folder of data files, which need not exist.

    Args:
        task: the task that reads it, for errors.
        path: the folder; None means the one that the environment variable THINWIRE_DATA names.
    """

    task: str
    path: Path | None = None

    @property
    def root(self) -> Path | None:
        """The folder, if any was named."""
        named = os.environ.get("THINWIRE_DATA", "")
        return self.path or (Path(named) if named else None)

    def has(self, *names: str) -> bool:
        """Return True if any of these files exists."""
        root = self.root
        return root is not None and any((root / name).is_file() for name in names)

    def lacks(self, *names: str) -> bool:
        """Return True if none of these files exists, so that they may be downloaded instead.

        Raises:
            ConfigError: a folder was named that does not exist.
        """
        if self.root is not None and not self.root.is_dir():
            raise ConfigError(self._no_folder(names[0]))
        return not self.has(*names)

    def file(self, name: str, *, otherwise: str = "") -> Path:
        """Return the path of a file that must exist.

        Args:
            name: its path within the folder.
            otherwise: another fix, which the error names too.

        Raises:
            ConfigError: the file or the folder does not exist, or no folder was named.
        """
        root = self.root
        if root is None:
            raise ConfigError(
                f"THINWIRE_DATA is not set, and task {self.task!r} reads {name} from the folder it names. "
                f"Set THINWIRE_DATA=FOLDER or pass data=FOLDER{otherwise}"
            )
        if not root.is_dir():
            raise ConfigError(self._no_folder(name) + otherwise)
        if not (root / name).is_file():
            raise ConfigError(
                f"{root / name} is missing, and task {self.task!r} needs it. "
                f"Put it there, or let THINWIRE_DATA (or data=) name another folder{otherwise}"
            )
        return root / name

    def _no_folder(self, name: str) -> str:
        return (
            f"{self.root} is not a folder, and task {self.task!r} reads {name} from it. "
            "Let THINWIRE_DATA (or data=) name the folder that holds it"
        )


def read(path: Path, reader: Callable[[Path], Content]) -> Content:
    """Return the content of the file as `reader` returns it.

    Raises:
        ConfigError: the reader failed; the message names the file.
    """
    try:
        return reader(path)
    except ConfigError:
        raise
    except _BROKEN as error:
        raise ConfigError(
            f"{path} cannot be read ({error}). It is damaged or not what its name says: copy it again"
        ) from error


def idx(path: Path) -> NDArray[np.uint8]:
    """Return a gzipped IDX file of bytes: two zeros, type 8, the number of axes, big-endian sizes, then the bytes."""
    raw = gzip.decompress(path.read_bytes())
    zero, kind, axes = struct.unpack_from(">HBB", raw)
    if zero or kind != 8:
        raise ValueError(f"it starts with {raw[:4].hex()}, and IDX of bytes starts with 000008")
    shape = struct.unpack_from(f">{axes}I", raw, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


# -- what is not in files: downloads, and arrays that are computed once ------------------------------------------------


def hub_installed() -> bool:
    """Return True if the `datasets` library is installed."""
    return importlib.util.find_spec("datasets") is not None


def download(name: str, split: str) -> Any:
    """Return one split of a data set, by its name on the hub; the library caches what it downloads.

    Raises:
        ConfigError: it cannot be downloaded.
    """
    library = importlib.import_module("datasets")
    try:
        return library.load_dataset(name, split=split)
    # Every exception, because the library raises those of whatever transport it uses.
    except Exception as error:
        raise ConfigError(
            f"{name} ({split}) cannot be downloaded ({error}). Go online, or let THINWIRE_DATA name a folder with it"
        ) from error


def labels_of(rows: Any) -> Indices:
    """Return the classes of all rows."""
    # Without the other columns, because iterating over images would decode them.
    return np.array([row["label"] for row in rows.select_columns(["label"])], np.int64)


def cached(name: str, make: Callable[[], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the array of this name, memory-mapped from its file, which is written first if it does not exist.

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
