"""Files that are there whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary name, flush to disk, then take the final name.

    Raises:
        OSError: the disk refused; whatever was at `path` before is still there.
    """
    put_in_place(write_aside(path, content), path)


def write_aside(path: Path, content: bytes) -> Path:
    """Write beside `path`, under a hidden name of its own, and flush to disk; returns that name.

    Raises:
        OSError: the disk refused; nothing is left behind.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return Path(temporary)


def put_in_place(aside: Path, path: Path) -> None:
    """Give a file that was written aside its final name, whatever was there before, and flush the folder.

    Raises:
        OSError: the disk refused; `path` is the old file or the new one, whole.
    """
    try:
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
