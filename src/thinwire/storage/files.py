"""Files that are there whole or not at all."""

import os
import secrets
from pathlib import Path
from stat import S_IMODE

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary name, flush to disk, then take the final name.

    Raises:
        OSError: the disk refused; whatever was at `path` before is still there.
    """
    put_in_place(write_aside(path, content), path)


def write_aside(path: Path, content: bytes) -> Path:
    """Write beside `path`, under a hidden name of its own, and flush to disk; returns that name.

    Who may read it is for the process's umask to say, as with `open`, and for the file that is at `path` already.

    Raises:
        OSError: the disk refused; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(temporary, _NEW, _mode(path))
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _mode(path: Path) -> int:
    """Who may read and write, before the umask: those who may now, or everybody where there is no file yet."""
    try:
        return S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0o666


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
