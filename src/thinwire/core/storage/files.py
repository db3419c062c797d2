# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files: a file is complete or not there at all."""

import errno
import os
import re
import secrets
from pathlib import Path
from stat import S_IMODE

from thinwire.errors import ConfigError

# O_EXCL: a temporary name is never one that exists, nor a link that someone else has put there.
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


# Also "s3:/", to which a `Path` shortens a URL; but no drive of Windows, such as "C:/".
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local_path(path: str | Path) -> Path:
    """A path that a user gave, with `~` expanded.

    Raises:
        ConfigError: it is a URL.
    """
    if _URL.match(str(path)):
        raise ConfigError(
            f"{path} is a URL. Files are written to and read from local file systems only. Mount the storage as a "
            "folder, or write to a folder and copy it"
        )
    return Path(path).expanduser()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk, then rename it.

    Raises:
        OSError: the disk refused; the file that was at `path` before is unchanged.
    """
    rename_into_place(write_temporary(path, content), path)


def check_writable(path: Path) -> None:
    """Make the folder that a file is to be written to, and see that it can be; for work that is worth a lot.

    Raises:
        OSError: it cannot be written.
    """
    make_folder_of(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    write_temporary(path, b"").unlink()


def make_folder_of(path: Path) -> None:
    """Make the folder of a file, if it is not there.

    Raises:
        OSError: it cannot be made; NotADirectoryError where it is a file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # That a file exists is no reason to give to whoever wants to write one.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None


def write_temporary(path: Path, content: bytes) -> Path:
    """Write a hidden file beside `path` and flush it to disk; returns its path.

    Its permissions are those of the file at `path`, or the process's default if there is none.

    Raises:
        OSError: the disk refused; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        mode = S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mode = 0o666  # less the umask, as with `open`; `tempfile` would hide the file from other users
    handle = os.open(temporary, _CREATE, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def rename_into_place(temporary: Path, path: Path) -> None:
    """Rename a temporary file to `path`, replacing the file there, and flush the folder to disk.

    Raises:
        OSError: the disk refused; `path` is the old file or the new one, complete.
    """
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # Without this the rename itself could be lost in a power failure.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
